"""Tensor parallelism: all-reduces, weights, errors. Outputs of several ranks: engine/test_ranks.py."""
from dataclasses import replace

import pytest
import torch

from common.errors import InputError
from kernels.scheme import Scheme
from kernels.tp import Ranks, Shard
from model import ModelArgs

ARGS = ModelArgs(
    vocab_size=50, hidden_size=32, intermediate_size=96, num_layers=2, num_heads=6, num_kv_heads=3,
    head_dim=16,
)


def shards(args: ModelArgs, count: int, scheme: Scheme | None = None) -> list[Shard]:
    return [Shard.for_rank(args, scheme, rank, count) for rank in range(count)]


@pytest.mark.parametrize("args, count, scheme, message", [
    (ARGS, 4, None, "4 ranks: 3 key/value heads for 6 query heads can be sharded over at most 3 ranks, or "),
    (replace(ARGS, intermediate_size=4), 3, None, "3 ranks: 4 inner, in units of 2, cannot be sharded"),
    (ARGS, 2, Scheme("int4", 32, None), None),
    (replace(ARGS, head_dim=8), 2, Scheme("w4a8", 32, None),
     "2 ranks: w4a8 has groups of 32 inputs, but rank 0 would have queries 0 to 16"),
    (replace(ARGS, vocab_size=2), 3, None, "2 tokens, in units of 1, cannot be sharded over these ranks"),
])
def test_unshardable_sizes_are_refused(args, count, scheme, message):
    if message is None:
        assert len(shards(args, count, scheme)) == count
        return
    with pytest.raises(InputError) as error:
        shards(args, count, scheme)
    assert message in str(error.value) and "--nproc-per-node" in str(error.value)


class LocalRanks(Ranks):
    """A rank whose collectives use the given values of the other ranks."""

    def __init__(self, rank: int, parts: list):
        super().__init__(rank, len(parts), "")
        object.__setattr__(self, "parts", parts)

    def all_gather(self, x):
        assert torch.equal(x, self.parts[self.rank])
        return torch.stack(self.parts)


def test_all_reduce_adds_in_rank_order():
    """So it is batch-invariant."""
    parts = [torch.randn(5, 7) * 10**i for i in range(4)]
    total = LocalRanks(2, parts).all_reduce(parts[2])
    assert torch.equal(total, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    row = [part[3:4] for part in parts]
    assert torch.equal(LocalRanks(0, row).all_reduce(row[0]), total[3:4])


def test_argmax_returns_the_lowest_rank_of_ties():
    value, token = torch.tensor([[1.0, 2, 5], [3, 2, 5], [3, 2, 4]]), torch.arange(9).view(3, 3)
    parts = [torch.stack((v.double(), t.double())) for v, t in zip(value, token)]
    assert LocalRanks(1, parts).argmax(value[1], token[1]).tolist() == [3, 1, 2]
