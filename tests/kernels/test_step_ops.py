"""Operators of a decoding step, for each instruction set, against their PyTorch definition, `Step`."""
import pytest
import torch
from helpers.kernels import draws, same
from helpers.states import random_tree, state_of
from torch import Tensor

from drafters.mixed import join
from drafters.ngram import NGram
from engine.sampling import seed_keys
from engine.state import State
from engine.step import TORCH_BACKEND, Step
from model import ModelArgs
from schedulers.costs import MarginalCosts
from tree import CandidateTree, Tree, TreeShape

pytestmark = pytest.mark.kernels


@pytest.fixture
def both(each_isa):
    """A function: call another with `Step` and with a CPU step; return both results."""
    return lambda function, *arguments: (function(Step(), *arguments), function(each_isa.step, *arguments))


def call(method: str):
    return lambda step, *arguments: getattr(step, method)(*arguments)


def operation(function):
    return lambda step, *arguments: getattr(step, function.__name__, function)(*arguments)


def random(*shape, seed=0):
    return draws(seed)(*shape)


def integers(high, shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("n", (64, 192))
def test_tree_attention_mask(both, n):
    length = torch.tensor([0, 7, 60, 64])
    local = random(4, 5, 9) > 0
    expected, found = both(lambda step: step.mask(torch.arange(n), length, local))
    assert torch.equal(expected, found) and found.any() and not found.all()


@pytest.mark.parametrize("V", (7, 4096, 9001))
@pytest.mark.parametrize("sampled", (False, True))
def test_draw(both, V, sampled):
    logits, depth = random(2, 5, V), torch.tensor([[0, 1, 1, 2, 2], [0, 1, 2, 3, 1]])
    logits[0, 0, 5] = logits[0, 0, 3::16] = 9.0  # ties with the first, adjacent and in the same vector lane
    logits[1, 2, ::2] = logits[1, 3] = float("-inf")
    logits[0, 3, 4], logits[0, 4, 6], logits[1, 4] = float("inf"), -torch.nan, torch.nan  # no token: -1
    noise = random(2, 4, V, seed=1) if sampled else None
    expected, found = both(call("draw"), logits, noise, depth)
    assert torch.equal(expected, found) and (sampled or found[0, 0] == 3)
    assert (found == -1).tolist() == [[False] * 3 + [True] * 2] * 2


@pytest.mark.parametrize("V, k", ((7, 7), (320, 4), (4097, 10), (9001, 60)))
@pytest.mark.parametrize("rows", (None, 1, 3))
def test_top_k(both, V, k, rows):
    logits = 3 * random(2, 3, V)
    noise = None if rows is None else random(2, rows, V, seed=1)
    (scores, ids), (found_scores, found_ids) = both(call("rank"), logits, noise, k)
    assert torch.equal(ids, found_ids)
    torch.testing.assert_close(found_scores, scores, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("k", (1, 4, 10))
def test_tree_growth(both, k):
    """Three levels have the same candidates and beams."""
    def grow(step) -> list:
        growth, found = CandidateTree(TreeShape(2, 3, k), random(3, k), torch.arange(3 * k).view(3, k)), []
        for level in range(3):
            children = random(3, k, k, seed=level + 1), integers(99, (3, k, k), level)
            growth.extend(*children)
            if level < 2:
                row = step.advance(growth)
                found += [row, growth.beam_scores, growth.beam_tokens, growth.beam_index, growth.beam_mask]
            found += growth.candidates
        return found

    expected, found = both(grow)
    assert len(found) == 19
    same(found, expected)


def test_gumbel_noise(both):
    """Within a few ulps. Noise does not depend on the other positions, or on the vocabulary size."""
    key, positions = seed_keys([3, 2**40 + 5]), torch.tensor([[0, 1, 2], [7, 8, 2**20]])
    temperature = torch.tensor([1.0, 0.5])
    expected, found = both(call("gumbel"), key, positions, temperature, 49157)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=2e-6)
    assert torch.equal(both(call("gumbel"), key, positions[:, 1:], temperature, 49157)[1], found[:, 1:])
    assert torch.equal(both(call("gumbel"), key, positions, temperature, 500)[1], found[..., :500])


def test_noise_is_reused_only_for_equal_arguments(each_isa):
    """Rows are reused only for the same slot, key, position and temperature."""
    keys, positions, latest = seed_keys([3, 4]), torch.tensor([[5, 6, 7], [9, 10, 11]]), []
    for key, at, temperature, size in (
        (keys, positions, [1.0, 0.5], 9000), (keys, positions + torch.tensor([[2], [1]]), [1.0, 0.5], 9000),
        (keys, positions, [0.7, 0.5], 9000), (keys.flip(0), positions, [0.7, 0.5], 9000),
        (keys, positions[:, :1], [0.7, 0.5], 9000), (keys, positions[:, :1], [0.7, 0.5], 500),
        (keys[:1], positions[:1], [0.7], 500), (keys, positions, [0.7, 0.5], 500),
    ):
        arguments = key, at, torch.tensor(temperature), size
        assert torch.equal(each_isa.step.gumbel(*arguments, latest), each_isa.step.gumbel(*arguments))
    latest[-1].fill_(3.0)
    found = each_isa.step.gumbel(key, positions + 1, torch.tensor(temperature), size, latest)
    assert (found[:, :2] == 3).all() and (found[:, 2] != 3).any()


def random_costs(seed: int, nodes: int, requests: int) -> MarginalCosts:
    """Return random costs, some negative, the last ones infinite. The first request has confidence 0."""
    costs = random(nodes - 1, seed=seed).abs() / 4
    costs[nodes // 2 :], costs[: seed % 3] = float("inf"), -1.0
    return MarginalCosts(0.1, costs, torch.arange(requests) / 2)


@pytest.mark.parametrize("with_costs", (False, True))
@pytest.mark.parametrize("shape", (TreeShape(2, 0, 1), TreeShape(8, 2, 4), TreeShape(60, 7, 10)), ids=str)
def test_prune_and_accept(both, shape, with_costs):
    """Random candidates, some with equal scores or NaN."""
    def grow(step, seed: int) -> tuple[Tree, Tensor, Tensor]:
        B, k, draw = 3, shape.width, iter(range(1000 * seed, 1000 * (seed + 1)))

        def children(*size):
            return -integers(4, size, next(draw)).float(), integers(6, size, next(draw))

        growth = CandidateTree(shape, *children(B, k))
        for level in range(shape.depth):
            if level:
                growth.advance()
            growth.extend(*children(B, k, k))
        if not with_costs:  # sorted first, before its parent
            growth.scores[-1][:, : 5 * seed : 3] = torch.nan
        costs = random_costs(seed, shape.nodes, B) if with_costs else None
        drafted = growth.prune(step, integers(6, (B,), next(draw)), costs)
        chosen = integers(6, drafted.tokens.shape, next(draw))
        return drafted, *step.accept(drafted, chosen, shape.max_commit)

    for seed in range(8):
        (tree, *taken), (found, *found_taken) = both(grow, seed)
        same([*found, *found_taken], [*tree, *taken])


@pytest.mark.parametrize("with_costs", (False, True))
@pytest.mark.parametrize("nodes", (2, 10, 20))
def test_join(both, nodes, with_costs):
    """Random trees over few tokens; some scores are equal or -inf."""
    for seed in range(8):
        one, other = (random_tree(12, 4, 1000 * s + seed) for s in (1, 2))
        one = one._replace(scores=one.scores.mul(3).round())
        other = other._replace(scores=other.scores.mul(3).round())
        other.scores[other.scores < -4] = float("-inf")
        costs = random_costs(seed, nodes, len(one.tokens)) if with_costs else None
        expected, found = both(operation(join), one, other, nodes, 4, costs)
        same(found, expected)


@pytest.mark.parametrize("lengths, shortest", (((7, 3, 1), 2), ((4,), 1), ((2, 2, 2, 2), 3)))
def test_lookup(both, lengths, shortest):
    """Random sequences of three distinct tokens; in memory, unrelated tokens precede and follow them."""
    matcher = NGram(lengths, min_match=shortest)
    for seed in range(8):
        texts = [integers(3, (n,), seed).tolist() for n in (1, 2, 5 + seed, 59)]
        state = state_of(texts)
        others = integers(4, (4, 50), seed) - 1  # of 0 to 2, with separators
        for before in (others[:, :0], torch.nn.functional.pad(others, (0, 1), value=-1)):
            tokens, count = torch.cat((before, state.tokens), 1), before.shape[1]
            expected, found = both(operation(NGram.lookup), matcher, tokens, state.length + count, count + 59)
            same(found, expected)


def test_commit_emits(both):
    """Sequences continue, stop at an id, reach their limit, or have ended; also with fewer columns than
    max_commit.
    """
    def commit(step, width):
        tokens = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 7], [5, 6, 7], [2, 2, 2]])
        count = torch.tensor([2, 3, 3, 3, 1])
        state = State(5, 40, 4, stop_ids=[2, 9], device=tokens.device)
        state.length.copy_(torch.tensor([3, 4, 5, 6, 7]))
        state.limit.copy_(torch.tensor([30, 30, 7, 30, 30]))
        state.done.copy_(torch.tensor([False, False, False, True, False]))
        state.tokens.copy_(torch.arange(200).view(5, 40))
        path = torch.arange(width).expand(5, -1)
        appended = step.commit(state, tokens[:, :width], count.clamp(max=width), path, None)
        return [appended, *(b for _, b in sorted(state.named_buffers()))]

    for width in (1, 3):
        expected, found = both(commit, width)
        same(found, expected)
        assert found[0].tolist() == ([2, 2, 2, 0, 1] if width == 3 else [1, 1, 1, 0, 1])


@pytest.mark.parametrize("more", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_commit_moves_features_keys_and_values(both, each_isa, more, dtype):
    """Features of 1 to 3 tokens are appended to unread ones up to the buffer's size. Keys and values move to
    the committed slots.
    """
    features = torch.randn(4, 5, 5, dtype=dtype)  # rows of odd sizes
    path, count = torch.tensor([[0, 2, 4], [0, 1, 3], [0, 3, 4], [0, 1, 2]]), torch.tensor([1, 3, 3, 2])
    args = ModelArgs(
        vocab_size=8, hidden_size=32, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=16,
    )
    first = torch.randn(2, 2, 4, 20, 2, 16).to(dtype)  # initial contents of the caches

    def commit(step, features, with_active):
        state = State(4, 41, 3, feature_width=5, dtype=dtype, unread=7, aligned=not step.batch_invariant)
        state.n_unread.copy_(torch.tensor([2, 4, 0, 3]))
        state.features.fill_(9)
        state.length.copy_(torch.tensor([2, 0, 7, 9]))
        state.limit.fill_(30)
        state.done.copy_(torch.tensor([False, False, False, True]))
        active = torch.tensor([True, True, True, False]) if with_active else None
        backend = TORCH_BACKEND if type(step) is Step else each_isa
        caches = backend.caches["auto"].allocate(args, 4, 20, dtype, "cpu", backend)
        for layer, cache in zip(first, caches):
            cache.k.copy_(layer[0]), cache.v.copy_(layer[1])
        step.commit(state, path, count, path, features, caches, active=active, append=more)
        kept = [
            x[b, : n + c] for cache in caches for x in (cache.k, cache.v)
            for b, (n, c) in enumerate(zip((2, 0, 7, 9), count))
        ]
        return state.n_unread, [row[:n] for row, n in zip(state.features, state.n_unread)], kept

    (n, rows, kept), (found_n, found, moved) = both(commit, features, True)
    assert n.tolist() == found_n.tolist() == ([3, 7, 3, 3] if more else [1, 3, 3, 3])
    assert all(torch.equal(a, b) for a, b in zip(rows + kept, found + moved))
    assert torch.equal(found[1][-3:], features[1, path[1]]) and (found[3] == 9).all()
    assert torch.equal(moved[2][7:10], first[0, 0, 2, 7 + path[2]])
    (n, *_), (found_n, *_) = both(commit, None, False)
    assert torch.equal(n, found_n)


@pytest.mark.parametrize("top_k, top_p", ((0, 0.9), (0, 1e-6), (1, 1.0), (5, 0.5), (300, 0.9), (1000, 1.0)))
def test_restrict(both, top_k, top_p):
    logits = random(3, 5, 300, seed=top_k) * 4
    logits[0, 0, :7] = logits[0, 0].max()  # ties, also of 0.0 and -0.0
    logits[0, 1, :9], logits[0, 1, 4:6], logits[0, 2, 50:] = 0.0, -0.0, float("-inf")
    logits[1, 3, 7], logits[1, 4] = -torch.nan, torch.nan
    for temperature in ([0.7, 1.3, 0.0], [1e-38, 1e-4, 1e6]):  # dividing by 1e-38 gives infinity
        requests = torch.tensor(temperature), torch.full((3,), top_k), torch.full((3,), top_p)
        expected, found = both(call("restrict"), logits, *requests)
        same(found[:, :3], expected[:, :3])
        for restricted in expected, found:  # `draw` finds NaN
            assert (Step().draw(restricted, None)[1] < 0).tolist() == [False] * 3 + [True] * 2
