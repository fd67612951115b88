"""Prompt lookup: the continuations it proposes are those a plain search finds."""
import pytest
import torch
from helpers.decoding import drafts
from helpers.states import state_of

from drafters.lookup import Lookup
from engine.engine import Engine
from sampling.options import Sampling
from tree import accept, chains


def searched(text: list[int], lengths, shortest: int, longest: int) -> list[list[int]]:
    """Search all earlier places: longest match first, then the latest; different first tokens."""
    last, places = len(text) - 1, []
    for p in range(last):
        same = 0
        while same < longest and p - same >= 0 and text[p - same] == text[last - same]:
            same += 1
        if same >= shortest:
            places.append((same, p))
    found, begun = [], set()
    for _, p in sorted(places, reverse=True):
        if len(found) < len(lengths) and text[p + 1] not in begun:
            begun.add(text[p + 1])
            period = last - p
            found.append([text[p + 1 + i % period] for i in range(lengths[len(found)])])
    return found + [[text[last]] * n for n in lengths[len(found) :]]


@pytest.mark.parametrize(
    "lengths, shortest, longest", [((7, 3, 1), 2, 4), ((4, 4), 1, 2), ((5,), 3, 3), ((2, 2, 2, 2), 1, 1)]
)
def test_it_proposes_what_a_search_finds(lengths, shortest, longest):
    g = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(0, k, (n,), generator=g).tolist() for k in (2, 3, 6) for n in (1, 2, 5, 17, 40, 55)
    ]
    drafter, state = Lookup(lengths, shortest, longest), state_of(texts)
    tree = drafter.propose(state, torch.arange(60), None).tree
    shape, hits = chains(lengths), 0
    for b, text in enumerate(texts):
        want = searched(text, lengths, shortest, longest)
        got = {
            (path[0], len(path) - 1): token for path, token in zip(shape.paths, tree.tokens[b, 1:].tolist())
        }
        assert [[got[c, i] for i in range(n)] for c, n in enumerate(lengths)] == want, text
        guess = drafter.has_guess(state_of([text]), torch.arange(60))
        last, worth = len(text) - 1, max(shortest, 2)  # a match of one token is rarely right
        assert guess == (longest >= worth and any(
            all(p >= i and text[p - i] == text[last - i] for i in range(worth)) for p in range(last)
        ))
        hits += guess
    assert 0 < hits < len(texts) or longest == 1


def test_equal_paths_side_by_side_are_one():
    """A filler may repeat a real chain: the deepest agreement counts once, whichever node is taken."""
    drafter = Lookup((3, 2), 1, 2)
    # Only one continuation: the other is filler.
    tree = drafter.propose(state_of([[5, 5, 5, 5, 5]]), torch.arange(60), None).tree
    assert tree.tokens[0].tolist() == [5] * 6
    path, count = accept(tree, torch.full((1, 6), 5), drafter.shape.window)
    assert count.tolist() == [4] and [tree.depth[0, i].item() for i in path[0]] == [0, 1, 2, 3]
    # As if rounding made the two differ.
    path, count = accept(tree, torch.tensor([[5, 5, 5, 5, 9, 9]]), drafter.shape.window)
    assert count.tolist() == [4] and path.tolist() == [[0, 1, 3, 5, *[0] * (drafter.shape.window - 4)]]


def test_without_a_match_the_step_is_a_plain_one(models):
    """On a CPU the tree is not even verified; the golden target repeats itself, and is drafted then."""
    engine = Engine(models[0], Lookup(shortest=4), compile=False, max_seq_len=200)
    sizes = {len(draft.tokens) for draft in drafts(engine, list(b"abcdefgh"), Sampling(40))}
    assert sizes == {1, 12}
