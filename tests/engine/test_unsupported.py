"""Unsupported devices, options and requests are rejected in one line."""
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import edit, refused

from common.errors import InputError
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.request import encode
from engine.target import Runtime, Target, load_target
from server.run import largest_engine
from tree import TreeShape


@pytest.fixture(scope="module")
def target(golden) -> Target:
    return load_target(golden, Runtime(device="cpu", compile=False))


def test_a_system_prompt_needs_a_template():
    with pytest.raises(InputError, match=r"--system\) needs a chat template"):
        encode(SimpleNamespace(has_template=False), "text", system="be brief")


def test_server_slots_fit_in_memory(target, monkeypatch):
    """With memory for four slots the default of sixteen becomes four; an explicit number of slots must fit.

    If free memory is unknown, nothing is rejected.
    """
    make = partial(largest_engine, target, DraftOptions(), max_seq_len=300)
    cache_bytes = make(batch=4, min_batch=4).runner.cache_bytes
    monkeypatch.setattr("engine.runner.free_memory", lambda device: cache_bytes + 1)
    assert make(batch=16, min_batch=1).batch == 4
    with pytest.raises(ValueError, match=r"the caches of 16 x \d+ slots need \d\.\d GB, 0\.0 GB are free"):
        make(batch=16, min_batch=16)
    monkeypatch.setattr("engine.runner.free_memory", lambda device: None)
    assert make(batch=16, min_batch=16).batch == 16


@pytest.mark.parametrize("compile", (False, True))
def test_cache_bytes_are_the_allocated_bytes(target, compile):
    engine = Engine(target.model, max_seq_len=32, compile=compile)
    assert engine.runner.cache_bytes == sum(buffer.nbytes for buffer in engine.runner.caches.buffers())


# -- invalid drafting options: methods, sizes, trees, folders, flags, datastores -----------------------------


TREE = TreeShape(8, 2, 3)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory) -> Path:
    """Return a folder of draft models (copies of the target) and datastores, each with one mismatch."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in ("renamed", "short", "smaller"):
        shutil.copytree(golden, folder / name)
    tokenizer = (golden / "tokenizer.json").read_text()
    (folder / "renamed" / "tokenizer.json").write_text(tokenizer.replace("<bos>", "<start>"))
    edit(folder / "short", max_seq_len=64), edit(folder / "smaller", vocab_size=64)
    for name, ids in {"other": [320] * 9, "few": [7] * 7}.items():
        (folder / name).write_bytes(torch.tensor(ids, dtype=torch.int32).numpy().tobytes())
    (folder / "cut").write_bytes(bytes(41))
    return folder


@pytest.mark.parametrize("options, message", [
    *(({"method": f"lookup+{other}"}, f"--speculate lookup+{other}: {message}") for other, message in (
        ("", "unknown"), ("lookup", "combine two"), ("none", "combine two"), ("eagle3+rest", "combine two"),
    )),
    ({"method": "lookup+lookahead"}, "--speculate lookup+lookahead: lookahead cannot be combined"),
    ({"method": "lookup", "flags": {"level": 4}}, "--level belongs to --speculate lookahead"),
    ({"method": "lookahead", "flags": {"window": "7"}}, "--window '7': must be 1 to 1,024"),
    ({"method": "eagle3", "tree": TreeShape(60, 2, 97)}, "tree: width 97 exceeds"),
    *(({"method": "draft-model", "draft": name}, f"{name}: {message}") for name, message in (
        ("renamed", "has a tokenizer with other ids than the target's; choose"),
        ("smaller", "has 64 rows in its embedding, the target 320; their tokenizer has 258 ids"),
        ("short", "has a context of 64 tokens, less than 65; use --max-seq-len 64"),
    )),
    *(({"method": "rest", "flags": {"datastore": name}}, f"--datastore {name}: {message}")
      for name, message in (
          ("short", "no such file"), ("cut", "is not a file of 8 to"), ("few", "is not a file of 8 to"),
          ("other", "token id 320 is outside the target's vocabulary 0..319"),
    )),
], ids=str)
def test_invalid_draft_options_raise_errors(llm, folder, monkeypatch, options, message):
    """Options of the Python API; the commands' flags are tested in test_cli_errors.py."""
    monkeypatch.chdir(folder)
    with refused(message):
        llm.target.engine(DraftOptions(**options), max_seq_len=65)


def test_default_max_seq_len_is_limited_by_the_draft_model(llm, folder):
    engine = llm.target.engine(DraftOptions("draft-model", folder / "short", tree=TREE))
    assert engine.drafter.shape == TREE and engine.max_seq_len == 64
