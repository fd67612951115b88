"""What cannot be drafted is refused in one line: methods, sizes, trees, folders, flags, token files."""
import shutil
from pathlib import Path

import pytest
import torch
from helpers import edit
from helpers.refusals import refused

from engine.drafting import Drafting
from tree import TreeShape

TREE = TreeShape(8, 2, 3)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory) -> Path:
    """Draft models, which are the target again, and token files, each with something that does not fit."""
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


@pytest.mark.parametrize("options, words", [
    *(({"method": f"lookup+{other}"}, f"--speculate lookup+{other}: {words}") for other, words in (
        ("", "unknown"), ("lookup", "join two methods"), ("none", "join two"), ("eagle3+rest", "join"),
    )),
    ({"method": "lookup+lookahead"}, "--speculate lookup+lookahead: lookahead cannot be combined"),
    ({"method": "lookup", "flags": {"level": 4}}, "--level belongs to --speculate lookahead"),
    ({"method": "lookahead", "flags": {"window": "7"}}, "--window '7': must be 1 to 1,024"),
    ({"method": "eagle3", "tree": TreeShape(60, 2, 97)}, "tree: width 97 exceeds"),
    *(({"method": "draft-model", "draft": name}, f"{name}: {words}") for name, words in (
        ("renamed", "has no tokenizer, or one with other ids"),
        ("smaller", "has 64 rows in its embedding, the target 320; their tokenizer has 258 ids"),
        ("short", "has a context of 64 tokens, less than 65; use --max-seq-len 64"),
    )),
    *(({"method": "rest", "flags": {"datastore": name}}, f"--datastore {name}: {words}") for name, words in (
        ("short", "no such file"), ("cut", "is not a file of 8 to"), ("few", "is not a file of 8 to"),
        ("other", "has the id 320, the target has 0 to 319"),
    )),
], ids=str)
def test_draftings_that_cannot_be(llm, folder, monkeypatch, options, words):
    """What no flag of a command can say, or not in these words; flags are in test_mistakes.py."""
    monkeypatch.chdir(folder)
    with refused(words):
        llm.target.engine(Drafting(**options), max_seq_len=65)


def test_a_draft_model_with_a_shorter_context_fits_a_shorter_text(llm, folder):
    engine = llm.target.engine(Drafting("draft-model", folder / "short", tree=TREE))
    assert engine.drafter.shape == TREE and engine.max_seq_len == 64
