"""What heads of other shapes cost: the command, on a tiny target."""
import json
import shutil

import head_shapes
import pytest

from engine.calibration import SHORT
from training.new_head import Shape


@pytest.mark.compile
def test_shapes_are_measured_beside_todays(golden, tmp_path, results, monkeypatch, capsys):
    kinds = {kind: (kind, 32, Shape(states=3 if kind[0] == "d" else None)) for kind in head_shapes.KINDS}
    monkeypatch.setattr(head_shapes, "SHAPES", kinds | {"two": ("eagle3", 32, Shape(num_layers=2))})
    checkpoint = tmp_path / "target"
    shutil.copytree(golden, checkpoint)
    (checkpoint / "eagle3/calibration.json").unlink(missing_ok=True)  # another test's
    options = ["--checkpoint", str(checkpoint), "--threads", "1", "--repeat", "1", "--tree", "5,2,2"]
    assert head_shapes.main(options) == 1
    assert "no calibration.json" in capsys.readouterr().err
    taus = {t: {"5/2/2": tau} for t, tau in (("0", 2.0), ("1", 1.5))}
    record = {"format": 1, "ease": [1.0], "tau": taus}
    (checkpoint / "eagle3/calibration.json").write_text(json.dumps(record))
    assert head_shapes.main(options) == 0
    today, *others = json.loads((results / "head-shapes.json").read_text())["rows"]
    assert today["trees"]["5/2/2"]["tau"] == 2.0 and [row["head"] for row in others] == [*kinds, "two"]
    for row in others:  # what a head costs more or less is what more or less it has to be accepted for
        share = row["trees"]["5/2/2"]["step"] / today["trees"]["5/2/2"]["step"]
        assert row["trees"]["5/2/2"]["tau"] == pytest.approx(2 * share)
        assert row["weights"] > 0 and row["read"][str(SHORT)]["4"] > 0
    two, one = others[-1], others[0]
    assert two["weights"] > one["weights"]
