"""Two drafters on one tree: what is joined, in which order, by which confidence."""
import pytest
import torch
from helpers.decoding import drafts
from helpers.states import paths, random_tree

from checkpoint.calibration import Confidence
from drafters.base import Drafter, Proposal
from drafters.eagle import Eagle
from drafters.lookup import Lookup
from drafters.mixed import Mixed
from engine.engine import Engine
from sampling.options import Sampling
from tree import Tree, TreeShape, join, link


def scored(tree: Tree, b: int) -> dict[tuple[int, ...], float]:
    """The score of each path, the best one where two nodes have the same."""
    found = {}
    for path, score in zip(paths(tree.tokens[b].tolist(), tree.parent[b].tolist()), tree.scores[b].tolist()):
        found[path] = max(score, found.get(path, -9e9))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_both_are_joined(seed):
    one, other = random_tree(9, 4, seed), random_tree(7, 3, seed + 100)
    joined, twice = join(one, other, 10, 4), join(one, one, 10, 4)
    for b in range(2):
        both = scored(other, b)
        for path, score in scored(one, b).items():
            both[path] = max(score, both.get(path, -9e9))
        best = sorted(both, key=both.get, reverse=True)[:10]
        assert scored(joined, b) == pytest.approx({path: both[path] for path in best})
        by_node = paths(joined.tokens[b].tolist(), joined.parent[b].tolist())
        assert joined.depth[b].tolist() == [len(path) for path in by_node]
        # Equal nodes leave places: what fills them is a guess like any other.
        assert scored(one, b).keys() <= scored(twice, b).keys()


class Fixed(Drafter):
    """Proposes two children of the root, with these scores."""

    def __init__(self, tokens: list[int], scores: list[float], confidence: Confidence):
        super().__init__(TreeShape(3, 0, 2))
        self.tokens, self.scores, self.confidence = tokens, scores, confidence

    def propose(self, state, slots, noise):
        B = state.length.shape[0]
        parent = torch.zeros(B, 3, dtype=torch.int64)
        tokens = torch.cat((state.root()[:, None], torch.tensor(self.tokens).expand(B, -1)), 1)
        scores = torch.tensor([0.0, *self.scores]).expand(B, -1)
        return Proposal(Tree(tokens, parent, *link(parent, 1), scores))


@pytest.mark.parametrize("temperature,kept", ((0.0, {1, 3}), (1.0, {3, 4}), (0.2, {1, 3})))
def test_confidences_are_those_of_the_temperature(models, temperature, kept):
    one, other = Confidence((1.0, 0.0), (3.0, 0.0)), Confidence((1.0, 0.0), (1.0, 0.0))
    mixed = Mixed(Fixed([1, 2], [-0.5, -1.0], one), Fixed([3, 4], [-0.6, -0.9], other), nodes=3)
    engine = Engine(models[0], mixed, max_seq_len=60, compile=False)
    seen = drafts(engine, [104, 105], Sampling(4, temperature))
    assert seen and all(set(draft.tokens[1:]) == kept for draft in seen)


def test_a_network_draws_at_all_its_levels(models):
    """Of a tree with more levels than nodes below the root, too."""
    target, head, *_ = models
    drafters = None, Mixed(Lookup(), Eagle(head, TreeShape(4, 5, 2)))
    engines = (Engine(target, drafter, max_seq_len=60, compile=False) for drafter in drafters)
    plain, drafted = (engine.generate([[104, 105]], Sampling(20, 1.0, seed=3))[0] for engine in engines)
    assert drafted.ids == plain.ids


def test_a_drafter_reads_the_features_of_its_own_layers(models):
    """Of those that two drafters need, side by side."""
    one, other = Eagle(models[1], TreeShape(8, 2, 3)), Drafter()
    other.aux_layers = (*one.aux_layers[1:], 99)
    mixed = Mixed(one, other)
    each = {layer: torch.full((1, 2, 4), layer) for layer in mixed.aux_layers}
    every = torch.cat([each[layer] for layer in mixed.aux_layers], -1)
    for part in one, other:
        assert torch.equal(part.own_features(every), torch.cat([each[i] for i in part.aux_layers], -1))
