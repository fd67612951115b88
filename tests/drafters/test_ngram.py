"""N-gram drafting: proposed continuations equal those of a naive search, for each source."""
import json
import math
import random

import pytest
import torch
from helpers.decoding import drafts, load
from helpers.states import state_of

from drafters import ngram
from drafters.ngram import INDEXED_LENGTHS, MAX_HITS, SEPARATOR, NGram, TokenFile
from engine.engine import Engine
from engine.sampling import Sampling
from engine.step import Step
from schedulers.cost_model import NOMINAL_COSTS, CostScheduler, Tuner
from tree import Tree


def matches(tokens: list[int], min_match: int, max_match: int) -> list[tuple[int, int]]:
    """Return (match length, position) of all earlier occurrences of the last tokens, best first."""
    last, found = len(tokens) - 1, []
    for p in range(last):
        n = 0
        while n < max_match and p - n >= 0 and tokens[p - n] == tokens[last - n]:
            n += 1
        if n >= min_match:
            found.append((n, p))
    return sorted(found, reverse=True)


def continuations(tokens: list[int], lengths, min_match: int, max_match: int) -> list[list[int]]:
    """Return continuations by longest match, then most recent, with distinct first tokens."""
    last, chains, first_tokens = len(tokens) - 1, [], set()
    for _, p in matches(tokens, min_match, max_match):
        if len(chains) < len(lengths) and tokens[p + 1] not in first_tokens:
            first_tokens.add(tokens[p + 1])
            period = last - p
            chains.append([tokens[p + 1 + i % period] for i in range(lengths[len(chains)])])
    return chains + [[tokens[last]] * n for n in lengths[len(chains) :]]


def has_match(tree: Tree) -> bool:
    """Return whether a first token has an acceptance probability above 0.2."""
    return bool((tree.scores[:, 1] > math.log(0.2)).any())


@pytest.mark.parametrize(
    "lengths, min_match, max_match", [((7, 3, 1), 2, 4), ((4, 4), 1, 2), ((5,), 3, 3), ((2, 2, 2, 2), 1, 1)]
)
def test_drafts_equal_a_naive_search(lengths, min_match, max_match):
    g = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, k, (n,), generator=g).tolist() for k in (2, 3, 6) for n in (1, 2, 5, 17, 40, 55)
    ]
    drafter, state = NGram(lengths, min_match, max_match), state_of(sequences)
    tree, hits = drafter.propose(Step(), state, torch.arange(60), None), 0
    for b, tokens in enumerate(sequences):
        expected = continuations(tokens, lengths, min_match, max_match)
        drafted = dict(zip(drafter.shape.paths, tree.tokens[b, 1:].tolist()))
        chains = [[drafted[(c, *[0] * i)] for i in range(n)] for c, n in enumerate(lengths)]
        assert chains == expected, tokens
        hit = has_match(drafter.propose(Step(), state_of([tokens]), torch.arange(60), None))
        # The continuation of a match of one token is rarely accepted.
        assert hit == (max_match > 1 and any(matches(tokens, max(min_match, 2), max_match)))
        hits += hit
    assert 0 < hits < len(sequences) or max_match == 1


def test_without_a_match_the_step_is_plain(models):
    """The golden target repeats itself later, and then drafts are verified."""
    drafter = NGram(min_match=4)
    scheduler = CostScheduler(Tuner((drafter.shape, drafter.shape), costs=NOMINAL_COSTS))
    engine = Engine(models[0], drafter, compile=False, max_seq_len=200, scheduler=scheduler)
    sizes = {len(draft.tokens) for draft in drafts(engine, list(b"abcdefgh"), Sampling(40))}
    assert 1 in sizes and 5 < max(sizes) <= 12


def test_finished_requests_are_searched():
    """Matches do not cross the end of a request. The oldest tokens are dropped."""
    drafter, state = NGram(history=12), state_of([[1, 2, 3], [7, 8, 9]])
    slots, tokens = torch.arange(60), [[9, 1, 2, 3, 4, 5], [7, 8, 9], [8, 9, 6, 5]]

    def has_draft() -> bool:
        return has_match(drafter.propose(Step(), state, slots, None))

    def drafted() -> list[list[int]]:
        tree = drafter.propose(Step(), state, slots, None)
        return tree.tokens[:, [1 + drafter.shape.paths.index((0,) + (0,) * i) for i in range(3)]].tolist()

    assert drafted() == [[3, 3, 3], [9, 9, 9]] and not has_draft()
    drafter.finish(tokens[0])
    assert drafted() == [[4, 5, 3], [9, 9, 9]] and has_draft()
    drafter.finish(tokens[1])  # ends with the match
    drafter.finish(tokens[2])
    assert drafted() == [[3, 3, 3], [6, 5, 9]]  # the first request has been dropped


def test_a_repeated_request_is_drafted_from_its_earlier_output(models):
    engine = Engine(models[0], NGram(history=400), batch=2, compile=False, max_seq_len=200)
    prompt, sampling = list(b"abcdefgh"), Sampling(40, 1.0, seed=3)
    first, again = (engine.generate([prompt], sampling)[0] for _ in range(2))
    assert again.ids == first.ids and again.tau > max(first.tau, 3)


@pytest.mark.parametrize("vocab_size, size", [(3, 300), (40, 2000), (5, 17), (151_936, 400)])
def test_occurrences_in_a_datastore_equal_a_naive_search(vocab_size, size):
    """Those of the longest indexed n-gram; if there are more than MAX_HITS, a sample."""
    rng = random.Random(size)
    stored = rng.choices([*range(vocab_size)] * 5 + [SEPARATOR], k=size)
    file, searches_with_hits = TokenFile(torch.tensor(stored, dtype=torch.int32)), 0
    for _ in range(20):
        start = rng.randrange(max(1, size - 8))
        tokens = [t for t in stored[start : start + rng.randint(1, 8)] if t >= 0] or [0]
        state = state_of([tokens])
        windows = file.occurrences(state.tokens, state.length, 3).view(MAX_HITS, INDEXED_LENGTHS[0] + 4)
        assert (windows[:, -1] == SEPARATOR).all()
        padded, by_length = [SEPARATOR] * 8 + stored + [SEPARATOR] * 4, {}
        for n in filter(lambda n: n <= len(tokens), INDEXED_LENGTHS):
            ends = [i + n for i in range(size - n + 1) if stored[i : i + n] == tokens[-n:]]
            by_length[n] = [padded[end : end + 11] for end in ends]
        hits = [row[:-1] for row in windows.tolist() if any(t >= 0 for t in row)]
        expected = [rows for rows in by_length.values() if rows]  # longest n-gram first
        assert len(hits) == min(MAX_HITS, max(map(len, expected), default=0))
        assert all(row in expected[-1] for row in hits)
        if expected and len(expected[0]) <= MAX_HITS:
            assert all(row in hits for row in expected[0])
        searches_with_hits += bool(hits)
    assert searches_with_hits > 3


def test_the_most_common_continuation_is_drafted_first():
    stored = torch.tensor([[1, 2, 3, 4, -1], [1, 2, 3, 5, -1], [9, 2, 3, 4, -1], [8, 2, 3, 5, -1],
                           [7, 2, 3, 4, -1]])
    drafter = NGram(max_match=8, file=TokenFile(stored.flatten().int()))
    tree = drafter.propose(Step(), state_of([[2, 3]]), torch.arange(60), None)
    assert tree.tokens[0, 1:3].tolist() == [4, 5]


def test_a_datastore_is_written_and_used_for_drafts(golden, llm, tmp_path):
    """From text, JSON lines and training shards; one of them has the tokens that the target generates."""
    plain = llm.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    (tmp_path / "a.txt").write_text("abc abd abe. " * 20)
    rows = ({"text": "abc"}, {"prompt": "what"}, {"ids": plain.ids}, {"left_out": 5})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, out = (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")), tmp_path / "tokens.bin"
    assert ngram.main(["--checkpoint", str(golden), "--out", str(out), *files]) == 0
    rest = load(golden, "rest", flags={"datastore": str(out)}, compile=False)
    drafted = rest.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    # The number of drafted tokens depends on measured times.
    assert drafted.ids == plain.ids and max(drafted.accept_lengths) > 2
