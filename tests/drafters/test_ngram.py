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


def places(text: list[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """Return (matching tokens, position) of all earlier occurrences, best first."""
    last, found = len(text) - 1, []
    for p in range(last):
        same = 0
        while same < longest and p - same >= 0 and text[p - same] == text[last - same]:
            same += 1
        if same >= shortest:
            found.append((same, p))
    return sorted(found, reverse=True)


def searched(text: list[int], lengths, shortest: int, longest: int) -> list[list[int]]:
    """Return continuations by longest match, then most recent, with distinct first tokens."""
    last, found, begun = len(text) - 1, [], set()
    for _, p in places(text, shortest, longest):
        if len(found) < len(lengths) and text[p + 1] not in begun:
            begun.add(text[p + 1])
            period = last - p
            found.append([text[p + 1 + i % period] for i in range(lengths[len(found)])])
    return found + [[text[last]] * n for n in lengths[len(found) :]]


def has_match(tree: Tree) -> bool:
    """True if some first token has an expected acceptance above 0.2."""
    return bool((tree.scores[:, 1] > math.log(0.2)).any())


@pytest.mark.parametrize(
    "lengths, shortest, longest", [((7, 3, 1), 2, 4), ((4, 4), 1, 2), ((5,), 3, 3), ((2, 2, 2, 2), 1, 1)]
)
def test_equals_naive_search(lengths, shortest, longest):
    g = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(0, k, (n,), generator=g).tolist() for k in (2, 3, 6) for n in (1, 2, 5, 17, 40, 55)
    ]
    drafter, state = NGram(lengths, shortest, longest), state_of(texts)
    tree, hits = drafter.propose(Step(), state, torch.arange(60), None), 0
    for b, text in enumerate(texts):
        want = searched(text, lengths, shortest, longest)
        got = dict(zip(drafter.shape.paths, tree.tokens[b, 1:].tolist()))
        assert [[got[(c, *[0] * i)] for i in range(n)] for c, n in enumerate(lengths)] == want, text
        guess = has_match(drafter.propose(Step(), state_of([text]), torch.arange(60), None))
        # A match of one token is rarely right.
        assert guess == (longest > 1 and any(places(text, max(shortest, 2), longest)))
        hits += guess
    assert 0 < hits < len(texts) or longest == 1


def test_no_match_is_a_plain_step(models):
    """On a CPU there is no verification then; the golden target repeats itself later, and drafts are made."""
    drafter = NGram(min_match=4)
    scheduler = CostScheduler(Tuner((drafter.shape, drafter.shape), costs=NOMINAL_COSTS))
    engine = Engine(models[0], drafter, compile=False, max_seq_len=200, scheduler=scheduler)
    sizes = {len(draft.tokens) for draft in drafts(engine, list(b"abcdefgh"), Sampling(40))}
    assert 1 in sizes and 5 < max(sizes) <= 12


def test_finished_requests_are_searched_too():
    """Matches do not cross the end of a request; the oldest tokens are dropped."""
    drafter, state = NGram(history=12), state_of([[1, 2, 3], [7, 8, 9]])
    slots, tokens = torch.arange(60), [[9, 1, 2, 3, 4, 5], [7, 8, 9], [8, 9, 6, 5]]

    def found() -> bool:
        return has_match(drafter.propose(Step(), state, slots, None))

    def drafted() -> list[list[int]]:
        tree = drafter.propose(Step(), state, slots, None)
        return tree.tokens[:, [1 + drafter.shape.paths.index((0,) + (0,) * i) for i in range(3)]].tolist()

    assert drafted() == [[3, 3, 3], [9, 9, 9]] and not found()
    drafter.finish(tokens[0])
    assert drafted() == [[4, 5, 3], [9, 9, 9]] and found()
    drafter.finish(tokens[1])  # ends with the match
    drafter.finish(tokens[2])
    assert drafted() == [[3, 3, 3], [6, 5, 9]]  # the first is forgotten


def test_a_batch_shares_its_history(models):
    """A repeated request is drafted from its earlier answer."""
    engine = Engine(models[0], NGram(history=400), batch=2, compile=False, max_seq_len=200)
    prompt, sampling = list(b"abcdefgh"), Sampling(40, 1.0, seed=3)
    first, again = (engine.generate([prompt], sampling)[0] for _ in range(2))
    assert again.ids == first.ids and again.tau > max(first.tau, 3)


@pytest.mark.parametrize("vocab_size, size", [(3, 300), (40, 2000), (5, 17), (151_936, 400)])
def test_a_token_file_is_searched_by_its_longest_indexed_n_grams(vocab_size, size):
    rng = random.Random(size)
    stored = rng.choices([*range(vocab_size)] * 5 + [SEPARATOR], k=size)
    file, found_any = TokenFile(torch.tensor(stored, dtype=torch.int32)), 0
    for _ in range(20):
        at = rng.randrange(max(1, size - 8))
        text = [t for t in stored[at : at + rng.randint(1, 8)] if t >= 0] or [0]
        state = state_of([text])
        windows = file.occurrences(state.tokens, state.length, 3).view(MAX_HITS, INDEXED_LENGTHS[0] + 4)
        assert (windows[:, -1] == SEPARATOR).all()
        padded, places = [SEPARATOR] * 8 + stored + [SEPARATOR] * 4, {}
        for n in filter(lambda n: n <= len(text), INDEXED_LENGTHS):
            ends = [i + n for i in range(size - n + 1) if stored[i : i + n] == text[-n:]]
            places[n] = [padded[end : end + 11] for end in ends]
        got = [row[:-1] for row in windows.tolist() if any(t >= 0 for t in row)]
        found = [rows for rows in places.values() if rows]
        assert len(got) == min(MAX_HITS, max(map(len, found), default=0))
        assert all(row in found[-1] for row in got)
        if found and len(found[0]) <= MAX_HITS:
            assert all(row in got for row in found[0])  # of the longest n-gram
        found_any += bool(got)
    assert found_any > 3


def test_the_most_common_continuation_is_drafted_first():
    stored = torch.tensor([[1, 2, 3, 4, -1], [1, 2, 3, 5, -1], [9, 2, 3, 4, -1], [8, 2, 3, 5, -1],
                           [7, 2, 3, 4, -1]])
    drafter = NGram(max_match=8, file=TokenFile(stored.flatten().int()))
    tree = drafter.propose(Step(), state_of([[2, 3]]), torch.arange(60), None)
    assert tree.tokens[0, 1:3].tolist() == [4, 5]


def test_a_token_file_is_written_and_drafts(golden, llm, tmp_path):
    """From text, JSON lines and training shards; one of them holds what the target will generate."""
    plain = llm.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    (tmp_path / "a.txt").write_text("abc abd abe. " * 20)
    rows = ({"text": "abc"}, {"prompt": "what"}, {"ids": plain.ids}, {"left_out": 5})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, out = (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")), tmp_path / "tokens.bin"
    assert ngram.main(["--checkpoint", str(golden), "--out", str(out), *files]) == 0
    fast = load(golden, "rest", flags={"datastore": str(out)}, compile=False)
    drafted = fast.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    # How many tokens a step drafts depends on measured times.
    assert drafted.ids == plain.ids and max(drafted.accept_lengths) > 2
