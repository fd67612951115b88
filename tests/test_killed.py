"""A kill -9 at any write leaves the old or the new under the final name, or nothing; never a part."""
import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_source
from tqdm import tqdm

from checkpoint.convert import convert
from checkpoint.dense import HeadOptions
from training.trainer import save_state

pytestmark = pytest.mark.slow

CALLS = {  # into C that change what is on the disk
    "write", "writelines", "flush", "close", "truncate", "replace", "rename", "mkdir", "unlink", "rmdir",
    "sendfile", "copy_file_range", "write_record", "write_end_of_file",
}


def killed_before(change: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that is killed before it changes the disk for the `change`th time, and print
    how. Returns False if it makes fewer changes and comes to its end.
    """
    if (pid := os.fork()) == 0:
        changes = itertools.count(1)

        def watch(frame, event, argument) -> None:
            if event == "c_call" and argument.__name__ in CALLS:
                owner = getattr(argument, "__self__", None)  # what is printed, or in memory, is on no disk
                if owner in (sys.stdout, sys.stderr) or isinstance(owner, (str, bytes, list, set)):
                    return
                if next(changes) == change:
                    sys.setprofile(None)
                    os.write(2, f"killed before change {change}, {argument.__name__}\n".encode())
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
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0


def contents(folder: Path) -> dict[str, bytes] | None:
    """What every file below a folder holds, by its path, but for partial ones; None without a folder."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("[!.]*") if p.is_file()}
    return found if folder.exists() else None


def prepare_conversion(place: Path) -> Callable[[], object]:
    """Convert a target with a head inside. Returns what converts it again, to another type."""
    config = CONFIG | {"num_hidden_layers": 2}
    source = write_source(place / "source", target_state(config), config)
    convert(source, place / "target", quiet=True)
    head = write_source(place / "head", head_state(), HEAD_CONFIG)
    convert(head, target=place / "target", options=HeadOptions(aux_layers=(0, 1, 2)), quiet=True)
    return lambda: convert(source, place / "target", dtype="bf16", force=True, quiet=True)


def prepare_state(place: Path) -> Callable[[], object]:
    """Save the state of a training. Returns what saves a later one."""
    def save(step: int) -> None:
        save_state(place / "target", {"step": step, "weights": torch.full((1000,), float(step))})

    (place / "target").mkdir(parents=True)
    save(1)
    return lambda: save(2)


@pytest.mark.parametrize("prepare, least", [(prepare_state, 5), (prepare_conversion, 30)])
def test_the_old_or_the_new(tmp_path, prepare, least):
    """Nothing only between two renames. A head moves into the new folder after that has its name."""
    place, missing = tmp_path / "place", 0
    action = prepare(place)
    shutil.copytree(place, tmp_path / "pristine")
    old = contents(place / "target")
    action()
    new, beside = contents(place / "target"), sorted(place.rglob("*"))
    assert new and new != old
    bare = {name: content for name, content in new.items() if "eagle3" not in name}
    for change in itertools.count(1):
        shutil.rmtree(place), shutil.copytree(tmp_path / "pristine", place)
        if not killed_before(change, action):
            break
        found = contents(place / "target")
        assert found in (old, new, bare, None)
        missing += found is None
    assert contents(place / "target") == new and sorted(place.rglob("*")) == beside
    assert change > least and missing <= 1
