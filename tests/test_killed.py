"""A kill -9 at any write leaves the old or the new, complete, and the next run goes on and leaves nothing."""
import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_source
from tqdm import tqdm

from checkpoint.convert import convert
from checkpoint.layouts import Answers
from common import files
from training.trainer import save_state

pytestmark = pytest.mark.slow

# Calls into C that change what is on the disk; of our own, the exchange of two folders is one.
CALLS = {
    "write", "writelines", "flush", "close", "truncate", "replace", "rename", "fsync", "link", "symlink",
    "mkdir", "unlink", "remove", "rmdir", "sendfile", "copy_file_range", "write_record", "write_end_of_file",
}


def kills(action: Callable[[], object], prepare: Callable[[], object]) -> Iterator[str]:
    """Run `action` in a child that is killed before its first change of the disk, then in one that is killed
    before its second and so on, until one comes to its end. Yields what was about to be done each time.

    prepare: called before each child.
    """
    for count in itertools.count(1):
        prepare()
        if (call := killed_at(count, action)) is None:
            return
        yield call


def killed_at(count: int, action: Callable[[], object]) -> str | None:
    """The call before which the child was killed; None if it made fewer and came to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        left = count

        def watch(frame, event, argument) -> None:
            nonlocal left
            name = argument.__name__ if event == "c_call" else frame.f_code.co_name
            if (event, name) == ("call", "exchange") or (event == "c_call" and name in CALLS):
                owner = getattr(argument, "__self__", None)  # what is printed, or in memory, is on no disk
                if owner in (sys.stdout, sys.stderr) or isinstance(owner, (str, bytes, list, set)):
                    return
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    os.write(write, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        tqdm.set_lock(threading.RLock())  # its own is shared by forks, and a killed one never gives it back
        signal.alarm(60)
        try:
            sys.setprofile(watch)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    os.close(write)
    with os.fdopen(read) as pipe:
        call = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return call if code else None


def contents(folder: Path) -> dict[str, bytes] | None:
    """What every file below a folder holds, by its path; None if there is no such folder."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("steps", ("two", pytest.param("one", marks=pytest.mark.dear)))
def test_converting_over_what_is_there(tmp_path, monkeypatch, steps):
    """A target with a head inside. In two steps, where the system has no exchange of folders, the old one may
    be missing after two of the kills; the next run brings it back.
    """
    place, config = tmp_path / "place", CONFIG | {"num_hidden_layers": 2}
    source = write_source(place / "source", target_state(config), config)
    convert(source, place / "target", quiet=True)
    head = write_source(place / "head", head_state(), HEAD_CONFIG)
    convert(head, target=place / "target", answers=Answers(aux_layers=(0, 1, 2)), quiet=True)
    if steps == "two":
        monkeypatch.setattr(files.ctypes, "CDLL", lambda name: None)

    def action() -> None:
        convert(source, place / "target", dtype="bf16", force=True, quiet=True)

    shutil.copytree(place, tmp_path / "pristine")
    old, missing, calls = contents(place / "target"), 0, []
    action()
    new, beside = contents(place / "target"), sorted(p.name for p in place.iterdir())
    assert new and new != old
    for call in kills(action, lambda: (shutil.rmtree(place), shutil.copytree(tmp_path / "pristine", place))):
        calls.append(call)
        found = contents(place / "target")
        assert found in (old, new, None), f"after {len(calls)} changes, before {call}"
        missing += found is None
        action()
        assert contents(place / "target") == new and sorted(p.name for p in place.iterdir()) == beside, calls
    assert len(calls) >= 40 and {"write", "fsync"} <= set(calls), calls
    assert missing <= 2 and (missing > 0) == (steps == "two")


def test_the_state_of_a_training(tmp_path):
    work = tmp_path / "work"

    def save(step: int) -> None:
        save_state(work, {"options": {"a": 1}, "step": step, "weights": torch.full((1000,), float(step))})

    def prepare() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        save(1)

    calls = []
    for call in kills(lambda: save(2), prepare):
        calls.append(call)
        state = torch.load(work / "state.pt", weights_only=True)
        assert state["step"] in (1, 2) and bool((state["weights"] == state["step"]).all())
        save(3)
        assert torch.load(work / "state.pt", weights_only=True)["step"] == 3
        assert [p.name for p in work.iterdir()] == ["state.pt"]
    assert {"write_record", "fsync", "replace"} <= set(calls), calls
