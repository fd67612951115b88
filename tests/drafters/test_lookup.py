"""Prompt lookup: the continuations it proposes are those a plain search finds, and the text is plain text."""
import pytest
import torch
from helpers.states import state_of

from drafters.lookup import Lookup
from engine.decoder import Decoder
from sampling.options import Sampling
from tree import accept, chains


def searched(text: list[int], lengths, shortest: int, longest: int) -> list[list[int]]:
    """The same by a plain search: all earlier places, longest match first, then the latest; different first
    tokens.
    """
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
        guess = bool(drafter.has_guess(state_of([text]), torch.arange(60)))
        last = len(text) - 1
        assert guess == any(
            all(p >= i and text[p - i] == text[last - i] for i in range(shortest)) for p in range(last)
        )
        hits += guess
    assert 0 < hits < len(texts) or shortest == 1


def test_equal_paths_side_by_side_are_one():
    """A filler may repeat a real chain: the deepest agreement counts once, whichever node is taken."""
    drafter = Lookup((3, 2), 1, 2)
    # Only one continuation: the other is filler.
    tree = drafter.propose(state_of([[5, 5, 5, 5, 5]]), torch.arange(60), None).tree
    assert tree.tokens[0].tolist() == [5] * 6
    path, count = accept(tree, torch.full((1, 6), 5), drafter.shape.window)
    assert count.tolist() == [4] and [tree.depth[0, i].item() for i in path[0]] == [0, 1, 2, 3]
    # As if rounding told the two apart.
    path, count = accept(tree, torch.tensor([[5, 5, 5, 5, 9, 9]]), drafter.shape.window)
    assert count.tolist() == [4] and path.tolist() == [[0, 1, 3, 5, *[0] * (drafter.shape.window - 4)]]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_text_is_plain_text(models, temperature):
    target, _ = models
    prompts = [list(b"abcabcabcabc"), list(b"u:why\na:"), list(b"the cat and the cat and the")]
    sampling = [Sampling(60, temperature, seed=i) for i in range(3)]
    plain = Decoder(target, batch=3, max_seq_len=200, compile=False).generate(prompts, sampling)
    decoder = Decoder(target, Lookup(), batch=3, max_seq_len=200, compile=False)
    fast = decoder.generate(prompts, sampling)
    assert [o.ids for o in fast] == [o.ids for o in plain]
    lengths = [n for o in fast for n in o.accept_lengths]
    if not temperature:  # the golden target repeats itself
        assert sum(lengths) / len(lengths) > 1.2


def test_without_a_match_the_step_is_a_plain_one(models):
    """On a CPU the tree is not even verified; with a batch, only if no sequence has a match."""
    target, _ = models
    decoder = Decoder(target, Lookup(shortest=4), compile=False, max_seq_len=200)
    sizes = []
    with decoder.observe(lambda tree, path: sizes.append(tree.tokens.shape[1])):
        decoder.generate([list(b"abcdefgh")], Sampling(40))
    assert 1 in sizes and set(sizes) <= {1, 12}
    asked = [
        bool(decoder.drafter.has_guess(state_of([text]), torch.arange(60)))
        for text in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 1, 2, 3, 4])
    ]
    assert asked == [False, True]


def test_the_command_line_takes_it(golden, capsys):
    import generate

    command = [
        "--checkpoint", str(golden), "--speculate", "lookup", "--prompt", "abc abc abc", "--no-compile",
        "--max-new-tokens", "30"
    ]
    assert generate.main([*command, "--compare"]) == 0
    assert "texts equal" in capsys.readouterr().err
    assert generate.main([*command, "--tree", "4,1,2"]) == 1
    assert "has no use for --tree" in capsys.readouterr().err


def test_impossible_chains_are_refused():
    for lengths in ((), (3, 0)):
        with pytest.raises(ValueError, match="chains of"):
            Lookup(lengths)
    with pytest.raises(ValueError, match="matches of"):
        Lookup(shortest=5, longest=4)
