"""What no drafter can be made of is refused in one line: sizes, trees, folders, flags of other methods."""
import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import InputError
from drafters import METHODS, add_flags, build_drafter, default_flags, known, read_flags
from drafters.draft_model import DraftModel
from drafters.eagle import Eagle
from drafters.hydra import Hydra
from drafters.lookahead import Lookahead
from drafters.lookup import Lookup
from drafters.medusa import Medusa
from drafters.request import Request
from drafters.retrieval import Rest
from drafters.tree_spec import default_tree, read_tree, with_numbers
from tokens.tokenizer import Tokenizer
from tree import PathTree, TreeShape, likely_tree

STORE = torch.arange(8, dtype=torch.int32)
TREE = TreeShape(8, 2, 3)


def heads(guesses: int, vocabulary: int):
    """What a drafter asks of Medusa or Hydra heads before it uses them."""
    return SimpleNamespace(args=SimpleNamespace(guesses=guesses, draft_vocab_size=vocabulary))


@pytest.mark.parametrize("make, words", [
    (lambda: Lookahead(9, window=0), "window 0, level 5, guess set 7: at least 1, 3 and 1"),
    (lambda: Lookahead(9, level=2), "level 2, guess set 7: at least 1, 3 and 1"),
    (lambda: Lookahead(9, guesses=0), "guess set 0: at least 1, 3 and 1"),
    (lambda: Lookahead(9, level=1000), "13986 rows a pass, at most 1024"),
    (lambda: Lookup(()), "each needs at least one"),
    (lambda: Lookup((3, 0)), "each needs at least one"),
    (lambda: Lookup(shortest=5, longest=4), "matches of 5 to 4 tokens"),
    (lambda: Lookup(shortest=0), "matches of 0 to 4 tokens"),
    (lambda: Rest(STORE, STORE, 9, nodes=1), "1 nodes, .*: at least 2, 1, 1 and 1"),
    (lambda: Rest(STORE, STORE, 9, shortest=0), "contexts of 0 to 16 tokens"),
    (lambda: Rest(STORE, STORE, 9, shortest=3, longest=2), "contexts of 3 to 2 tokens"),
    (lambda: Rest(STORE, STORE, 9, depth=0), "depth 0"),
    (lambda: Rest(STORE, STORE, 9, hits=0), "at least 2, 1, 1 and 1"),
    (lambda: Medusa(heads(2, 99), likely_tree(8, 3)), "3 levels, and heads for 2"),
    (lambda: Hydra(heads(2, 99), likely_tree(8, 3)), "3 levels, and heads for 2"),
    (lambda: Medusa(heads(2, 3), PathTree(((0,), (3,)))), "width 4 exceeds the heads' vocabulary of 3"),
], ids=range(16))
def test_impossible_sizes(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_trees_that_a_network_cannot_draft(models):
    target, head = models
    with pytest.raises(ValueError, match="width 97 exceeds the head's vocabulary of 96"):
        Eagle(head, TreeShape(60, 2, 97))
    with pytest.raises(ValueError, match="width 321 exceeds the head's vocabulary of 320"):
        DraftModel(target, TreeShape(60, 2, 321))
    for shape in (TREE, TreeShape(4, 3, 1)):  # a tree; a chain that is cut
        with pytest.raises(ValueError, match=f"needs a chain.* not {shape.nodes},{shape.depth}"):
            DraftModel(target, shape, rule="residual")
    DraftModel(target, TreeShape(6, 4, 1), rule="residual")


@pytest.fixture
def request_for(golden, models):
    """request_for(method, ...) -> a `Request` for the golden target."""

    def make(method: str, **changes) -> Request:
        request = {
            "method": method, "checkpoint": golden, "target": models[0], "tokenizer": Tokenizer.load(golden),
            "draft": None, "tree": None, "default_tree": TREE, "coupled": True, "max_seq_len": 512,
            "reach": 0, "rule": "equal", "flags": default_flags(method) if method in METHODS else {},
            "prepare": lambda *models: None,
        }
        return Request(**request | changes)

    return make


def refused(request: Request, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        build_drafter(request)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method, changes, words", [
    ("eagle4", {}, "--speculate eagle4: unknown; choose from none, eagle"),
    ("none", {"rule": "residual"}, "--accept residual: plain decoding drafts nothing"),
    *((method, {"rule": "residual"}, "--accept residual: is for --speculate draft-model")
      for method in METHODS if method not in ("none", "draft-model")),
    *((method, {"draft": Path("x")}, f"--speculate {method}: has no use for --draft")
      for method in ("lookup", "lookahead", "rest")),
    *((method, {"tree": TREE}, f"--speculate {method}: has no use for --tree")
      for method in ("lookup", "lookahead", "rest")),
    *((method, {"draft": Path("nowhere")}, f"nowhere: no {method} head there")
      for method in ("eagle", "eagle3")),
    ("eagle3", {"tree": TreeShape(60, 2, 97)}, "width 97 exceeds"),
    ("medusa", {}, "medusa: no medusa head there"), ("hydra", {}, "hydra: no hydra head there"),
    ("medusa", {"draft": Path("/"), "tree": TREE}, "--speculate medusa: takes a static tree"),
    ("hydra", {"draft": Path("/"), "tree": "auto"}, "--speculate hydra: takes a static tree"),
    ("draft-model", {}, "name a smaller converted model"),
    ("draft-model", {"draft": Path("/"), "tree": "auto"}, "takes --tree paper or nodes,depth,width only"),
    (
        "draft-model",
        {"draft": Path("/"), "tree": PathTree(((0,),))},
        "takes --tree paper or nodes,depth,width only",
    ),
    ("draft-model", {"draft": Path("/nowhere")}, "/nowhere"),
    ("lookahead", {"flags": {"window": 0, "level": 5, "guess-set": 7}}, "at least 1, 3 and 1"),
    ("rest", {}, "name a store with --datastore"),
    ("rest", {"flags": {"datastore": "/nowhere", "draft-tokens": 8}}, "--datastore /nowhere: no store, it"),
], ids=str)
def test_requests_that_cannot_be_met(request_for, method, changes, words):
    refused(request_for(method, **changes), words)


@pytest.fixture(scope="module")
def drafts(golden, tmp_path_factory) -> Path:
    """Draft models: the target again, as `renamed` and `bare` with other tokenizer files, and `larger`."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in ("same", "renamed"):
        shutil.copytree(golden, folder / name)
    tokenizer = (golden / "tokenizer.json").read_text()
    (folder / "renamed" / "tokenizer.json").write_text(tokenizer.replace("<bos>", "<start>"))
    for name in ("bare", "larger"):
        shutil.copytree(golden, folder / name, ignore=shutil.ignore_patterns("tokenizer*"))
    config = json.loads((golden / "config.json").read_text())
    (folder / "larger" / "config.json").write_text(json.dumps(config | {"vocab_size": 321}))
    return folder


@pytest.mark.parametrize("draft, changes, words", [
    pytest.param("same", {"tree": TREE, "rule": "residual"}, "needs a chain", id="residual-with-a-tree"),
    pytest.param(
        "same", {"max_seq_len": 4096}, "reads 1024 tokens,.* there is room for 4096", id="shorter-context"
    ),
    pytest.param("renamed", {}, "its tokenizer gives other ids", id="other-tokenizer"),
    pytest.param("bare", {}, "has no tokenizer files to compare", id="no-tokenizer"),
    pytest.param("larger", {}, "has a vocabulary of 321, the target one of 320", id="other-vocabulary"),
])
def test_draft_models_that_do_not_fit(drafts, request_for, draft, changes, words):
    refused(request_for("draft-model", draft=drafts / draft, **changes), words)


@pytest.mark.parametrize("draft, changes", [("same", {}), ("bare", {"tokenizer": None})], ids=str)
def test_draft_models_that_fit(drafts, request_for, draft, changes):
    assert isinstance(build_drafter(request_for("draft-model", draft=drafts / draft, **changes)), DraftModel)


def test_flags_belong_to_methods():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = parser.parse_args(["--window", "3"])
    assert read_flags(options, ["none", "lookahead"])["lookahead"]["window"] == 3
    with pytest.raises(InputError, match="--window belongs to --speculate lookahead"):
        read_flags(options, ["lookup"])
    with pytest.raises(InputError, match="--speculate magic: unknown"):
        known("magic")


@pytest.mark.parametrize("text, error, words", [
    ("8;2;3", InputError, "8;2;3: none of auto, paper, T,D,K or a JSON file"),
    ("8,2", InputError, "8,2: none of"), ("nowhere.json", InputError, "nowhere.json: none of"),
    ("60,1,2", ValueError, "only draft 6"), ("BROKEN", InputError, "none of"),
    ("NUMBER", InputError, "none of"), ("ORPHAN", InputError, "has no parent"),
    ("EMPTY", InputError, r"paths is \[\]; expected at least 1"),
    ("WORDS", InputError, r"paths\[0\]\[0\] is 'a'; expected a whole number"),
])
def test_trees_that_cannot_be_read(tmp_path, text, error, words):
    files = {"BROKEN": "[[0", "ORPHAN": "[[0], [1, 0]]", "NUMBER": "3", "EMPTY": "[]", "WORDS": '[["a"]]'}
    if text in files:
        (tmp_path / text).write_text(files[text])
        text = str(tmp_path / text)
    with pytest.raises(error, match=words):
        read_tree(text)


def test_numbers_fill_up_a_tree():
    assert with_numbers(None, None, None, TREE) == TREE
    assert with_numbers(5, None, 2, TREE) == TreeShape(5, 2, 2)
    assert with_numbers(None, 3, None, "paper") == TreeShape(60, 3, 10)
    with pytest.raises(ValueError, match="only draft"):
        with_numbers(60, None, None, default_tree("cpu"))
