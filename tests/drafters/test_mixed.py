"""Two drafters on one tree: what is joined, in which order, by which confidence."""
import pytest
from helpers.decoding import drafts
from helpers.states import paths, random_tree

from drafters.mixed import Mixed, join
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from tree import Tree, TreeShape


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


@pytest.mark.parametrize("temperature, which", ((0.2, 0), (0.2, 1), (1.0, 0), (1.0, 1)))
def test_the_surer_one_drafts_as_if_it_were_alone(models, models1, temperature, which):
    """From the features of its own layers, with noise at all levels, also if those are more than nodes."""
    trees = []
    for joint in (False, True):
        parts = HeadDrafter(models[1], TreeShape(6, 7, 2)), HeadDrafter(models1[1], TreeShape(6, 2, 3))
        parts[1 - which].sampled_score_factor = 1e6
        engine = Engine(models[0], Mixed(*parts) if joint else parts[which], max_seq_len=90, compile=False)
        steps = drafts(engine, list(range(97, 120)), Sampling(30, temperature, seed=3))
        trees.append([set(paths(draft.tokens, draft.parent)) for draft in steps])
    assert trees[0] == trees[1] and len(trees[0]) > 5
