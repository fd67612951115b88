"""REST: its tree holds the most frequent continuations that a plain search finds; its stores."""
import json
import random
from pathlib import Path

import pytest
import torch
from helpers.decoding import load
from helpers.states import paths, state_of

from drafters import rest
from drafters.rest import Rest

divsufsort = pytest.importorskip("pydivsufsort").divsufsort


def counted(
    store: list[int], text: list[int], vocab_size: int, longest: int, shortest: int, depth: int
) -> dict[tuple, int] | None:
    """By a plain search: how often each beginning of a continuation follows the longest context that occurs.
    None if none does.
    """
    for size in range(min(longest, len(text)), shortest - 1, -1):
        places = [i + size for i in range(len(store) - size + 1) if store[i : i + size] == text[-size:]]
        if places:
            found: dict[tuple, int] = {}
            for p in places:
                ahead = store[p : p + depth]
                ahead = ahead[: next((j for j, t in enumerate(ahead) if t >= vocab_size), len(ahead))]
                for n in range(1, len(ahead) + 1):
                    found[tuple(ahead[:n])] = found.get(tuple(ahead[:n]), 0) + 1
            return found
    return None


@pytest.mark.parametrize(
    "vocab_size, size, nodes",
    [(3, 300, 20), (40, 2000, 12), (5, 17, 8), (151_936, 400, 12)]
)
def test_the_tree_is_that_of_a_plain_search(vocab_size, size, nodes):
    rng, tokens = random.Random(size), [*range(vocab_size)] * 5 + [vocab_size]
    store = [rng.choice(tokens) for _ in range(size)]
    array = torch.tensor(store, dtype=torch.int32)
    suffixes = torch.from_numpy(divsufsort(array.numpy()))
    drafter = Rest(array, suffixes, vocab_size, nodes=nodes, longest=5, shortest=2, depth=4)
    drafter.allocate(4, 64, torch.float32, "cpu")
    found_any = 0
    for _ in range(10):
        texts = []
        for _ in range(4):
            at = rng.randrange(max(1, size - 8))
            texts.append([t for t in store[at : at + rng.randint(1, 8)] if t < vocab_size] or [0])
        state = state_of(texts)
        tree = drafter.propose(state, None, None).tree
        expected = [counted(store, text, vocab_size, 5, 2, 4) for text in texts]
        assert bool(drafter.has_guess(state, None)) == any(counts is not None for counts in expected)
        for b, (counts, text) in enumerate(zip([counts or {} for counts in expected], texts)):
            drawn, parent = tree.tokens[b].tolist(), tree.parent[b].tolist()
            assert drawn[0] == text[-1] and len(drawn) == nodes
            path = paths(drawn, parent)
            live = [i for i in range(1, nodes) if tree.scores[b, i] > float("-inf")]
            drafted = [path[i] for i in live]
            assert len(set(drafted)) == len(drafted) == min(len(counts), nodes - 1)
            best = sorted(counts.values(), reverse=True)[: nodes - 1]
            assert sorted((counts[p] for p in drafted), reverse=True) == best
            assert tree.depth[b].tolist() == [len(path[i]) for i in range(nodes)]
            total = max(1, sum(n for p, n in counts.items() if len(p) == 1))
            assert all(tree.scores[b, i].exp() <= counts[path[i]] / total + 1e-5 for i in live)
            found_any += bool(drafted)
    assert found_any > 3


def test_a_store_is_built_and_mapped_into_memory(golden, llm, tmp_path):
    """Of text, of JSON lines and of the training's shards, among them what the target will write."""
    plain = llm.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    (tmp_path / "a.txt").write_text("abc abd abe. " * 20)
    rows = ({"text": "abc"}, {"prompt": "what"}, {"ids": plain.ids}, {"left_out": 5})
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, store = (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")), tmp_path / "store"
    assert rest.main(["build", "--checkpoint", str(golden), "--out", str(store), *files]) == 0
    fast = load(golden, "rest", flags={"datastore": str(store)}, compile=False)
    drafted = fast.generate("abc abd abe. abc", raw=True, max_new_tokens=40)
    assert drafted.ids == plain.ids and max(drafted.accept_lengths) > 8
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert all(f"{store}/{name}.bin" in maps.read_text() for name in ("tokens", "suffixes"))
