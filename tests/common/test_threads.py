"""How many threads there are by default: no more than the processors that this process may use."""
import os

import pytest
import torch

from common import threads

CASES = {
    "of a group": (3, {"own": "0::/a/b", "a/b/cpu.max": "300000 100000"}),
    "of the group above": (
        2, {"own": "0::/a/b", "a/cpu.max": "200000 100000", "a/b/cpu.max": "300000 100000"}
    ),
    "only the top is mounted": (2, {"own": "0::/docker/1234", "cpu.max": "200000 100000"}),
    "no cgroups": (8, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_quotas(monkeypatch, tmp_path, case):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    count, files = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert threads.processors(tmp_path, tmp_path / "own") == count


def test_the_first_call_decides(monkeypatch):
    given = [8]  # the numbers of threads that PyTorch is given; 3 processors may be used
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(threads, "processors", lambda: 3)
    monkeypatch.setattr(threads, "_decided", False)
    threads.use_threads()
    assert given[-1] == 3
    given.append(8)  # somebody's own choice
    threads.use_threads()
    assert given[-1] == 8
