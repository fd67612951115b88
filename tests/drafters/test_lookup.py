"""Prompt lookup: the continuations it proposes are those a plain search finds."""
import pytest
import torch
from helpers.decoding import drafts
from helpers.states import state_of

from drafters.lookup import Lookup
from engine.engine import Engine
from sampling.options import Sampling


def places(text: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """(Tokens that match, where) of all earlier places, the best first."""
    last, found = len(text) - 1, []
    for p in range(last):
        same = 0
        while same < longest and p - same >= 0 and text[p - same] == text[last - same]:
            same += 1
        if same >= shortest:
            found.append((same, p))
    return sorted(found, reverse=True)


def searched(text: list[int], lengths, shortest: int, longest: int) -> list[list[int]]:
    """The longest match first, then the latest; different first tokens."""
    last, found, begun = len(text) - 1, [], set()
    for _, p in places(text, shortest, longest):
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
    tree, hits = drafter.propose(state, torch.arange(60), None).tree, 0
    for b, text in enumerate(texts):
        want = searched(text, lengths, shortest, longest)
        got = dict(zip(drafter.shape.paths, tree.tokens[b, 1:].tolist()))
        assert [[got[(c, *[0] * i)] for i in range(n)] for c, n in enumerate(lengths)] == want, text
        guess = drafter.has_guess(state_of([text]), torch.arange(60))
        # A match of one token is rarely right.
        assert guess == (longest > 1 and any(places(text, max(shortest, 2), longest)))
        hits += guess
    assert 0 < hits < len(texts) or longest == 1


def test_without_a_match_the_step_is_a_plain_one(models):
    """On a CPU the tree is not even verified; the golden target repeats itself, and is drafted then."""
    engine = Engine(models[0], Lookup(shortest=4), compile=False, max_seq_len=200)
    sizes = {len(draft.tokens) for draft in drafts(engine, list(b"abcdefgh"), Sampling(40))}
    assert sizes == {1, 12}
