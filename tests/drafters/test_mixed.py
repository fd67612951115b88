"""Two drafters on one tree: what is joined, in which order, by which confidence."""
import json
import shutil

import pytest
import torch
from helpers.states import random_tree
from safetensors.torch import load_file

import generate
from common.errors import InputError
from drafters import known
from drafters.base import Confidence, Drafter, Proposal
from drafters.draft_model import DraftModel
from drafters.eagle import Eagle
from drafters.lookup import Lookup
from drafters.mixed import Mixed
from engine.calibrating import fit_confidence
from engine.decoder import Decoder
from sampling.options import Sampling
from tree import Tree, TreeShape, join, link


def paths(tree: Tree, b: int) -> dict[tuple[int, ...], float]:
    """The score of each path."""
    found = {(): 0.0}
    by_node = [()]
    for node in range(1, tree.tokens.shape[1]):
        path = (*by_node[int(tree.parent[b, node])], int(tree.tokens[b, node]))
        by_node.append(path)
        found[path] = max(float(tree.scores[b, node]), found.get(path, -9e9))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_both_are_joined(seed):
    one, other = random_tree(9, 4, seed), random_tree(7, 3, seed + 100)
    joined = join(one, other, 10, 4)
    for b in range(2):
        both = paths(other, b)
        for path, score in paths(one, b).items():
            both[path] = max(score, both.get(path, -9e9))
        best = sorted(both, key=both.get, reverse=True)[:10]
        assert paths(joined, b) == pytest.approx({path: both[path] for path in best})
        assert [int(x) for x in joined.depth[b]] == [len(p) for p in _by_node(joined, b)]


def _by_node(tree: Tree, b: int) -> list[tuple[int, ...]]:
    by_node = [()]
    for node in range(1, tree.tokens.shape[1]):
        assert int(tree.parent[b, node]) < node
        by_node.append((*by_node[int(tree.parent[b, node])], int(tree.tokens[b, node])))
    return by_node


def test_trees_that_are_alike_are_filled_up():
    """Nodes that are counted once leave places: what fills them is a guess like any other."""
    one = random_tree(6, 3, 0)
    joined = join(one, one, 10, 3)
    for b in range(2):
        assert paths(one, b).keys() <= paths(joined, b).keys()
        _by_node(joined, b)


class Fixed(Drafter):
    """Proposes two children of the root, with these scores."""

    def __init__(self, tokens: list[int], scores: list[float]):
        super().__init__(TreeShape(3, 0, 2))
        self.tokens, self.scores = tokens, scores

    def propose(self, state, slots, noise):
        B = state.length.shape[0]
        parent = torch.zeros(B, 3, dtype=torch.int64)
        tokens = torch.cat((state.root()[:, None], torch.tensor(self.tokens).expand(B, -1)), 1)
        scores = torch.tensor([0.0, *self.scores]).expand(B, -1)
        return Proposal(Tree(tokens, parent, *link(parent, 1), scores))


@pytest.mark.parametrize("temperature,kept", ((0.0, {1, 3}), (1.0, {3, 4}), (0.2, {1, 3})))
def test_confidences_are_those_of_the_temperature(models, temperature, kept):
    mixed = Mixed(Fixed([1, 2], [-0.5, -1.0]), Fixed([3, 4], [-0.6, -0.9]), nodes=3)
    mixed.believe([Confidence((1.0, 0.0), (3.0, 0.0)), Confidence((1.0, 0.0), (1.0, 0.0))])
    decoder, seen = Decoder(models[0], mixed, max_seq_len=60, compile=False), []
    with decoder.observe(lambda tree, path: seen.append(set(tree.tokens[0, 1:].tolist()))):
        decoder.generate([[104, 105]], Sampling(4, temperature))
    assert seen and all(tokens == kept for tokens in seen)


def test_a_confidence_is_found_again():
    """Nodes that are right as often as exp(0.8 s - 0.2) of them, 40,000 of them."""
    g = torch.Generator().manual_seed(0)
    scores = -4 * torch.rand(40_000, generator=g)
    right = torch.rand(40_000, generator=g) < (0.8 * scores - 0.2).exp()
    slope, shift = fit_confidence([(scores, right)])
    assert slope == pytest.approx(0.8, abs=0.04) and shift == pytest.approx(-0.2, abs=0.03)


def test_drafters_that_cannot_be_joined(models):
    with pytest.raises(ValueError, match="drawn at random"):
        Mixed(Lookup(), DraftModel(models[0], TreeShape(6, 4, 1), rule="residual"))
    for name, words in (
        ("lookup+", "unknown"), ("lookup+eagle9", "unknown"), ("lookup+lookup", "two different"),
        ("lookup+none", "two different"), ("lookup+eagle3+rest", "two different"),
    ):
        with pytest.raises(InputError, match=words):
            known(name)


def test_a_tree_with_room_for_both_is_better_than_either(models):
    """On a text that repeats itself and goes on."""
    target, head = models
    prompt, sampling = list(b"u:the tide comes in\na:the tide comes in, the tide"), Sampling(120)

    def tau(drafter) -> float:
        out, = Decoder(target, drafter, max_seq_len=300, compile=False).generate([prompt], sampling)
        return sum(out.accept_lengths) / len(out.accept_lengths)

    shape = TreeShape(12, 3, 4)
    assert tau(Mixed(Lookup(), Eagle(head, shape), 24)) > max(tau(Lookup()), tau(Eagle(head, shape)))


def test_where_one_has_nothing_the_other_drafts_alone(models):
    """Lookup without a match leaves its rows to the head, and gets none of its own."""
    target, head = models
    torch.manual_seed(0)
    prompt, sampling = torch.randperm(256)[:24].tolist(), Sampling(16, temperature=1.0, seed=3)
    lengths, eagle = [], Eagle(head, TreeShape(12, 3, 4))
    for drafter in (eagle, Mixed(Lookup(shortest=4), Eagle(head, TreeShape(12, 3, 4)))):
        out, = Decoder(target, drafter, max_seq_len=100, compile=False).generate([prompt], sampling)
        lengths.append(out.accept_lengths)
    assert lengths[0] == lengths[1] and max(lengths[0]) > 1


@pytest.mark.slow
def test_what_draft_names_where_both_take_one(golden, capsys):
    """A draft model has no folder of its own, two methods of one head share it; else nobody could tell."""
    words = ["--checkpoint", str(golden), "--no-compile", "--compare", "--max-new-tokens", "8"]
    words += ["--prompt", "abc"]
    assert generate.main([*words, "--speculate", "draft-model+eagle3", "--draft", str(golden)]) == 0
    assert generate.main([*words, "--speculate", "eagle+eagle2", "--draft", str(golden / "eagle")]) == 0
    capsys.readouterr()
    assert generate.main([*words, "--speculate", "eagle2+eagle3", "--draft", str(golden / "eagle")]) == 1
    assert "both take a head; convert them into the checkpoint's folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("methods", ("lookup+eagle3", "eagle3+lookup"))
def test_generate_says_what_two_took(golden, capsys, methods):
    words = ["--checkpoint", str(golden), "--no-compile", "--max-new-tokens", "8", "--prompt", "abc"]
    assert generate.main([*words, "--speculate", methods]) == 0
    assert "GB/s of weights read" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_names_two(golden, tmp_path, capsys):
    common = ["--checkpoint", str(golden), "--no-compile", "--max-new-tokens", "30", "--json"]
    common += ["--prompt", "abcabcabc"]
    both = [*common, "--speculate", "lookup+eagle3", "--compare"]
    assert generate.main([*both, "--trace", str(tmp_path / "trace")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal"] and said["tau"] > 1 and "000.draft_tokens" in load_file(tmp_path / "trace")
    assert generate.main([*both, "--tree", "6,1,3", "--temperature", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    moved = tmp_path / "head"
    shutil.copytree(golden / "eagle3", moved)
    assert generate.main([*both, "--draft", str(moved)]) == 0
    capsys.readouterr()
    for options, words in (
        (["--speculate", "lookup+lookahead", "--tree", "6,1,3"], "has no use for --tree"),
        (["--speculate", "eagle2+eagle3", "--draft", str(moved)], "both take a head"),
        (["--speculate", "lookup+eagle3", "--accept", "residual"], "accepted by equality"),
        (["--speculate", "lookup+eagle3", "--datastore", "x"], "belongs to --speculate rest"),
    ):
        assert generate.main([*common, *options]) == 1
        assert words in capsys.readouterr().err
