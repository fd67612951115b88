"""The tree against slow, obvious Python: growing, pruning, masks."""
import random
import re

import pytest
import torch
from helpers.states import paths

from tree import Growth, PathTree, TreeShape, link


def grow(shape: TreeShape, draw, root: int):
    """Grow a batch of one with children drawn by `draw(path) -> [(logp, token)] * k`, ours and by brute
    force.

    Returns (Tree, set of (path, token) kept by brute force).
    """
    k = shape.width
    first = draw(())
    growth = Growth(shape, torch.tensor([[s for s, _ in first]]), torch.tensor([[t for _, t in first]]))
    nodes = [((t,), s) for s, t in first]  # candidates in flat order
    beam = newest = list(nodes)
    for level in range(shape.depth):
        if level:
            growth.advance()
            beam = sorted(newest, key=lambda n: -n[1])[:k]
        children = [draw(path) for path, _ in beam]
        growth.extend(
            torch.tensor([[[s for s, _ in c] for c in children]]),
            torch.tensor([[[t for _, t in c] for c in children]])
        )
        newest = [
            (path + (t,), torch.tensor(score).add(s).item())
            for (path, score), c in zip(beam, children) for s, t in c
        ]
        nodes += newest
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i][1], i))[: shape.nodes - 1]
    return growth.prune(torch.tensor([root])), {nodes[i][0] for i in best}


@pytest.mark.parametrize(
    "shape", [(8, 2, 3), (16, 3, 4), (60, 7, 10), (5, 0, 4), (5, 3, 1), (2, 1, 2), (13, 2, 3)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_pruned_tree_is_the_best_subset(shape, ties):
    shape = TreeShape(*shape)
    for seed in range(8):
        rng = random.Random(seed)

        # With ties many children have probability 1: they equal their parent's score and must not be kept
        # without it.
        def draw(path, rng=rng):
            scores = [0.0 if ties and rng.random() < 0.6 else -rng.random() for _ in range(shape.width)]
            return list(zip(sorted(scores, reverse=True), rng.sample(range(100), shape.width)))

        tree, best = grow(shape, draw, root=7)
        _, *kept = paths(tree.tokens[0].tolist(), tree.parent[0].tolist())
        assert tree.tokens.shape == (1, shape.nodes) and tree.tokens[0, 0] == 7
        assert len(set(kept)) == shape.nodes - 1
        for path in kept:
            assert len(path) == 1 or path[:-1] in kept, "a node was kept without its parent"
        if not ties:  # with ties brute force may pick another of several equal subsets in its beam
            assert set(kept) == best
        assert tree.depth[0].tolist() == [0] + [len(p) for p in kept]


def test_ancestors_and_depth_by_walking():
    rng = random.Random(0)
    parent = torch.tensor([[0] + [rng.randrange(i) for i in range(1, 24)] for _ in range(5)])
    depth, ancestors = link(parent, levels=24)
    for b in range(5):
        for i in range(24):
            seen, j = {i, 0}, i
            while j:
                j = int(parent[b, j])
                seen.add(j)
            assert {k for k in range(24) if ancestors[b, i, k]} == seen
            assert depth[b, i] == len(seen) - 1


@pytest.mark.parametrize("shape, words", [
    *(((TreeShape, *numbers), words) for numbers, words in (
        ((0, 1, 1), "must be positive"), ((8, -1, 2), "must be positive"), ((8, 2, 0), "must be positive"),
        ((8, 1, 2), "only draft 6 + the root"), ((1, 2, 0), "drafts nothing"), ((1, 0, 3), "drafts nothing"),
    )),
    *(((PathTree, paths), words) for paths, words in (
        ((), "no paths"), (((),), "no list of ranks"), (((0,), (-1,)), "no list of ranks"),
        (((True,),), "no list of ranks"), ((("a",),), "no list of ranks"), (((0,), (1, 0)), "has no parent"),
        (((0,), (0,)), "given twice"),
    )),
], ids=str)
def test_impossible_shapes_are_refused(shape, words):
    kind, *arguments = shape
    with pytest.raises(ValueError, match=f"tree: .*{re.escape(words)}"):
        kind(*arguments)
