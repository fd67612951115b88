"""What cannot be drafted is refused in one line: methods, sizes, trees, folders, flags, stores."""
import json
import shutil
from pathlib import Path

import pytest
from helpers import edit
from helpers.refusals import refused

from drafters import Drafting, rest
from tokens.tokenizer import Tokenizer
from tree import TreeShape

TREE = TreeShape(8, 2, 3)


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory) -> Path:
    """Draft models, which are the target again, and stores, each with something about it that does not fit.
    """
    folder = tmp_path_factory.mktemp("drafts")
    for name in ("renamed", "short", "larger"):
        ignored = shutil.ignore_patterns("tokenizer*") if name == "larger" else None
        shutil.copytree(golden, folder / name, ignore=ignored)
    tokenizer = (golden / "tokenizer.json").read_text()
    (folder / "renamed" / "tokenizer.json").write_text(tokenizer.replace("<bos>", "<start>"))
    edit(folder / "short", max_seq_len=64), edit(folder / "larger", vocab_size=321)
    own, tokens = rest.fingerprint(Tokenizer.load(golden)), {"tokens": 2, "suffixes": "int32"}
    for name, size, tokenizer in ("other", 320, "0" * 64), ("few", 7, own), ("cut", 320, own):
        (folder / name).mkdir()
        about = {"vocab_size": size, "tokenizer": tokenizer, **tokens}
        (folder / name / "store.json").write_text(json.dumps(about))
        (folder / name / "tokens.bin").write_bytes(b"cut")
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
        ("renamed", "has no tokenizer, or one that gives other ids"),
        ("larger", "has a vocabulary of 321, the target one of 320"),
        ("short", "reads 64 tokens, there is room for 65; --max-seq-len 64"),
    )),
    ({"method": "draft-model", "draft": "short", "tree": "auto"}, "--speculate draft-model: takes --tree"),
    *(({"method": "rest", "flags": {"datastore": name}}, words) for name, words in (
        ("short", "--datastore short: no store, it holds no store.json"), ("cut", "cut/tokens.bin: is "),
        ("few", "few: made for a vocabulary of 7, the target has 320"), ("other", "other: made with another"),
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
