"""Tree growth and pruning against brute force. Depths, masks and paths: the golden traces."""
import random
import re

import pytest
import torch
from helpers.states import paths

from drafters.static import PathTree
from engine.step import Step
from schedulers.costs import MarginalCosts
from tree import CandidateTree, TreeShape, prune_candidates


def grow(shape: TreeShape, children_of, root: int):
    """Grow one tree from `children_of(path) -> [(logp, token)] * k`, with CandidateTree and by brute force.

    Returns (Tree, set of paths kept by brute force).
    """
    beam = newest = nodes = [((t,), s) for s, t in children_of(())]  # candidates in flat order
    scores, tokens = [s for _, s in nodes], [t for (t,), _ in nodes]
    growth = CandidateTree(shape, torch.tensor([scores]), torch.tensor([tokens]))
    for level in range(shape.depth):
        if level:
            growth.advance()
            beam = sorted(newest, key=lambda n: -n[1])[: shape.width]
        children = [children_of(path) for path, _ in beam]
        scores_and_tokens = torch.tensor(children)[None]
        growth.extend(scores_and_tokens[..., 0], scores_and_tokens[..., 1].long())
        newest = [
            (path + (t,), torch.tensor(score).add(s).item())
            for (path, score), c in zip(beam, children) for s, t in c
        ]
        nodes = nodes + newest
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i][1], i))[: shape.nodes - 1]
    return growth.prune(Step(), torch.tensor([root])), {nodes[i][0] for i in best}


@pytest.mark.parametrize("shape", [(16, 3, 4), (60, 7, 10), (5, 0, 4), (5, 3, 1), (2, 1, 2), (13, 2, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_pruned_tree_is_the_best_subset(shape, ties):
    """With ties many children have probability 1: they equal their parent's score and must not be kept
    without it.
    """
    shape = TreeShape(*shape)
    for seed in range(8):
        rng = random.Random(seed)

        def children_of(path, rng=rng):
            scores = [0.0 if ties and rng.random() < 0.6 else -rng.random() for _ in range(shape.width)]
            return list(zip(sorted(scores, reverse=True), rng.sample(range(100), shape.width)))

        tree, best = grow(shape, children_of, root=7)
        _, *kept = paths(tree.tokens[0].tolist(), tree.parent[0].tolist())
        assert tree.tokens[0, 0] == 7 and len(kept) == len(set(kept)) == shape.nodes - 1
        assert all(len(path) == 1 or path[:-1] in kept for path in kept)
        assert ties or set(kept) == best  # with ties brute force may have another of several equal beams
        assert tree.depth[0].tolist() == [0] + [len(p) for p in kept]


@pytest.mark.parametrize("shape_type, arguments, message", [
    (TreeShape, (0, 1, 1), "must be at least 2"), (TreeShape, (8, 1, 2), "only draft 6 + the root"),
    (TreeShape, (1, 2, 0), "must be at least 2"), (PathTree, [()], "no paths"),
    (PathTree, [((0,), (-1,))], "not a list of ranks"), (PathTree, [((0,), (1, 0))], "has no parent"),
    (PathTree, [((0,), (0,))], "is repeated"),
])
def test_invalid_shapes_raise_errors(shape_type, arguments, message):
    with pytest.raises(ValueError, match=f"tree: .*{re.escape(message)}"):
        shape_type(*arguments)


@pytest.mark.parametrize("seed", range(6))
def test_marginal_costs_keep_the_nodes_with_the_largest_net_gain(seed):
    """Nodes whose gain is at least twice their cost are expanded."""
    rng = torch.Generator().manual_seed(seed)
    scores, nodes = -3 * torch.rand(2, 12, generator=rng), 0.3 * torch.rand(9, generator=rng)
    costs = MarginalCosts(0.3, nodes, torch.tensor([1.5, 0.5]))
    probabilities = [sorted((min(1.0, confidence * p) for p in row.exp().tolist()), reverse=True)
                     for confidence, row in zip((1.5, 0.5), scores)]
    gains = [sum(each) for each in zip(*probabilities)]
    net_gains = [sum(gains[:n]) - float(nodes[:n].sum()) for n in range(10)]
    assert net_gains[costs.keep(scores)] == pytest.approx(max(net_gains))
    expanded = [x for x in gains[:4] if x >= 2 * nodes[0]]
    assert costs.expand(scores, 4) == (len(expanded) if sum(expanded) / 2 >= 0.3 else 0)
    root, parents = torch.tensor([7, 8]), torch.full((2, 12), -1)
    kept = prune_candidates(root, scores, parents, parents, 10, 1, costs)
    assert kept.tokens.shape[1] == costs.keep(scores) + 1
    for high in MarginalCosts(9.0, nodes + 9, costs.confidence), costs._replace(confidence=torch.zeros(2)):
        assert high.keep(scores) == high.expand(scores, 4) == 0
        assert prune_candidates(root, scores, parents, parents, 10, 1, high).tokens.tolist() == [[7], [8]]
