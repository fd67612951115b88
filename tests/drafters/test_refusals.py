"""What cannot be drafted is refused in one line: sizes, trees, folders, flags."""
import shutil
from pathlib import Path

import pytest
from helpers import edit
from helpers.refusals import refused

from drafters import METHODS, Drafting
from tree import TreeShape

TREE = TreeShape(8, 2, 3)


@pytest.mark.parametrize("options, words", [
    *(({"method": f"lookup+{other}"}, f"--speculate lookup+{other}: {words}") for other, words in (
        ("", "unknown"), ("lookup", "join two methods"), ("none", "join two"), ("eagle3+rest", "join"),
    )),
    *(({"method": method, "accept": "residual"}, "--accept residual: is for --speculate draft-model")
      for method in (*sorted(METHODS.keys() - {"draft-model"}), "lookup+draft-model")),
    ({"method": "eagle3", "accept": "some"}, "--accept some: unknown; choose from equal,"),
    ({"method": "lookup", "flags": {"level": 4}}, "--level belongs to --speculate lookahead"),
    ({"method": "lookahead", "flags": {"window": "7"}}, "--window '7': must be 1 to 1,024"),
], ids=str)
def test_draftings_that_cannot_be(options, words):
    """What no flag of a command can say, or not in these words; flags are in test_mistakes.py."""
    with refused(words):
        Drafting(**options)


@pytest.fixture(scope="module")
def drafts(golden, tmp_path_factory) -> Path:
    """Draft models: the target again, each with something about it that does not fit."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in ("renamed", "short", "larger"):
        ignored = shutil.ignore_patterns("tokenizer*") if name == "larger" else None
        shutil.copytree(golden, folder / name, ignore=ignored)
    tokenizer = (golden / "tokenizer.json").read_text()
    (folder / "renamed" / "tokenizer.json").write_text(tokenizer.replace("<bos>", "<start>"))
    edit(folder / "short", max_seq_len=64), edit(folder / "larger", vocab_size=321)
    return folder


@pytest.mark.parametrize("method, draft, options, words", [
    ("eagle3", None, {"tree": TreeShape(60, 2, 97)}, "tree: width 97 exceeds"),
    ("draft-model", "renamed", {}, "DRAFTS/renamed: has no tokenizer, or one that gives other ids"),
    ("draft-model", "larger", {}, "DRAFTS/larger: has a vocabulary of 321, the target one of 320"),
    ("draft-model", "short", {"tree": "auto"}, "--speculate draft-model: takes --tree paper or nodes,depth"),
], ids=str)
def test_drafters_that_do_not_fit(llm, drafts, method, draft, options, words):
    with refused(words.replace("DRAFTS", str(drafts))):
        llm.target.engine(Drafting(method, draft and drafts / draft, **options))


def test_a_draft_model_with_a_shorter_context_fits_a_shorter_text(llm, drafts):
    for options in ({"tree": TREE}, {"accept": "residual"}):
        engine = llm.target.engine(Drafting("draft-model", drafts / "short", **options))
        assert engine.drafter.shape == options.get("tree", TreeShape(6, 4, 1)) and engine.max_seq_len == 64
    with refused(f"{drafts / 'short'}: reads 64 tokens, there is room for 65; --max-seq-len 64"):
        llm.target.engine(Drafting("draft-model", drafts / "short"), max_seq_len=65)
    with refused("accepting by residuals needs a chain"):
        llm.target.engine(Drafting("draft-model", drafts / "short", TREE, "residual"), max_seq_len=64)
