"""The picture of a run, which needs matplotlib; a run does not."""
import pytest

from training import curves

ENTRIES = [{"step": i, "loss": 3.0 - i / 10, "accuracy": [0.1 * i, 0.05 * i]} for i in range(1, 6)]
ENTRIES.append({"step": 5, "epoch": 1, "held_out": [0.5, 0.4], "tau": 1.8})


@pytest.mark.parametrize("there", (True, False))
def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, there):
    if not there:
        monkeypatch.setattr(curves, "find_spec", lambda name: None)
    curves.draw_curves(ENTRIES, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists() == there


def test_without_steps_there_is_none(tmp_path):
    curves.draw_curves(ENTRIES[-1:], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
