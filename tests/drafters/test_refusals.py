"""What cannot be drafted is refused in one line: sizes, trees, folders, flags."""
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import edit
from helpers.refusals import refused

from drafters import GPU_ROWS, METHODS, Drafting, default_tree
from drafters.block import deep_tree
from drafters.draft_model import DraftModel
from drafters.lookup import Lookup
from drafters.medusa import Hydra, Medusa
from tree import PAPER_TREE, PathTree, TreeShape, likely_tree

TREE = TreeShape(8, 2, 3)


def heads(guesses: int, vocabulary: int):
    """What a drafter reads of Medusa or Hydra heads before it uses them."""
    return SimpleNamespace(args=SimpleNamespace(drafts=guesses, draft_vocab_size=vocabulary, aux_layers=()))


@pytest.mark.parametrize("make, words", [
    (lambda *_: Lookup((3, 0)), "each needs at least one"),
    (lambda *_: Hydra(heads(2, 99), likely_tree(8, 3)), "3 levels below its root, the head drafts 2"),
    (lambda *_: Medusa(heads(2, 3), PathTree(((0,), (3,)))), "width 4 exceeds the head's vocabulary of 3"),
    (lambda target, head: DraftModel(target, TREE, rule="residual"), "needs a chain.* not 8,2,3"),
], ids=range(4))
def test_impossible_sizes(models, make, words):
    with pytest.raises(ValueError, match=words):
        make(*models)


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


def test_default_trees():
    assert deep_tree(TreeShape(60, 7, 10), 15) == TreeShape(60, 14, 12)
    for nodes, levels in ((2, 1), (12, 4), (64, 4), (30, 1)):
        tree = likely_tree(nodes, levels)
        assert tree.nodes == nodes and tree.window - 1 <= levels
    with pytest.raises(ValueError, match="draft nothing"):
        likely_tree(1, 4)
    assert default_tree("cuda:1") == PAPER_TREE and default_tree("cuda", batch=64).nodes == 4
    for batch in range(1, 49):
        tree = default_tree("cuda", batch=batch)
        assert batch * tree.nodes <= GPU_ROWS and (tree == PAPER_TREE) == (batch <= 3)
    assert default_tree("cpu").nodes > default_tree("cpu", True).nodes
    assert default_tree("cpu", True, "avx512bf16").nodes > default_tree("cpu", False, "avx2").nodes
