"""There are no more threads than processors that this process may use."""
import os

import pytest

from common import machine


@pytest.mark.parametrize("own, quotas, count", [
    ("0::/a/b", {"a/b": 3}, 3), ("0::/a/b", {"a": 2, "a/b": 3}, 2),
    ("0::/docker/1234", {".": 2}, 2),  # only the top is mounted
    ("0::/", {}, 8),
])
def test_quotas(monkeypatch, tmp_path, own, quotas, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (tmp_path / "own").write_text(f"{own}\n")
    for group, processors in quotas.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{processors}00000 100000\n")
    assert machine.processors(tmp_path, tmp_path / "own") == count
    given = []
    monkeypatch.setattr(machine, "processors", lambda: count)
    monkeypatch.setattr("torch.set_num_threads", given.append)
    machine.use_threads(5), machine.use_threads()  # the first call decides
    assert given == [min(count, 5)]
