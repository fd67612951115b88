"""How many threads there are by default: no more than the processors that this process may use."""
import os
from pathlib import Path

import pytest
import torch

from common import threads
from common.threads import processors, use_threads


@pytest.fixture
def eight(monkeypatch):
    """Eight processors to run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def written(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """A folder of cgroups, and the file that names ours."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder, folder / "own"


V1 = "3:memory:/elsewhere\n1:cpu,cpuacct:"
CASES = {
    "one": (1, {"own": "0::/", "cpu.max": "100000 100000"}),
    "of a group": (3, {"own": "0::/a/b", "a/b/cpu.max": "300000 100000"}),
    "of the group above": (
        2, {"own": "0::/a/b", "a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}
    ),
    "only the top is mounted": (2, {"own": "0::/docker/1234", "cpu.max": "200000 100000"}),
    "version 1": (
        2, {"own": V1 + "/a", "cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}
    ),
    "no cgroups": (8, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas(eight, tmp_path, case):
    count, files = CASES[case]
    assert processors(*written(tmp_path, files)) == count


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """The numbers of threads that PyTorch is given; before it has 8, and 3 processors may be used."""
    given = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(threads, "processors", lambda: 3)
    monkeypatch.setattr(threads, "_decided", False)
    return given


def test_the_first_call_decides(counted):
    use_threads()
    assert counted[-1] == 3
    counted.append(8)  # somebody's own choice
    use_threads()
    assert counted[-1] == 8
