"""Gated DeltaNet over trees and chains, against PyTorch."""
import copy
from functools import partial

import pytest
import torch
from helpers.ahead_of_time import expensive

from families.hybrid import RING_BUFFERS, DeltaBlock, DeltaCache, DeltaCaches, HybridArgs, Paths, boundary_of
from kernels.gpu import delta
from model import PassInputs

PARENTS = [0, 0, 0, 1, 1, 2, 3, 5, 6]  # of a tree on five levels, its root the first


def passes(lengths: list[int], chain: int, dtype: torch.dtype):
    """Return a layer of odd sizes, its cache with states one block behind, and a pass over a chain or a tree.
    """
    args = HybridArgs(32, 32, 32, 4, 2, 1, 16, delta_layers=(1, 1, 1, 0), delta_heads=2, delta_key_heads=1,
                      delta_key_dim=24, delta_value_dim=40, delta_taps=4, zero_centred=True)
    B, length = len(lengths), torch.tensor(lengths)
    cache = DeltaCaches.of_layers(1, B, args, dtype, "cpu")[0]
    cache.randomize(length, torch.Generator().manual_seed(0))
    T = chain or len(PARENTS)
    local, depth = torch.eye(T, dtype=torch.bool), torch.zeros(T, dtype=torch.int64)
    for i in range(1, T):
        parent = i - 1 if chain else PARENTS[i]
        local[i] |= local[parent]
        depth[i] = depth[parent] + 1
    slots = length[:, None] + torch.arange(T)
    visible = torch.arange(max(lengths) + T) < length[:, None, None]
    visible = visible.repeat(1, T, 1).scatter(2, slots[:, None].expand(B, T, T), local.expand(B, T, T))
    shared = PassInputs(args, torch.ones(8), length[:, None] + depth, slots, visible)
    block = DeltaBlock(args)
    for x in block.parameters():
        x.normal_()
    projected = torch.randn(B, T, sum(block.widths)).to(dtype)
    return block.to(dtype), cache, projected, Paths(shared, 4, cache.start)


@pytest.mark.parametrize("lengths, chain, dtype", (
    ((5, 37), 0, torch.float32), *expensive(
        ((70, 31), 1, torch.bfloat16), ((300, 16), 0, torch.bfloat16), ((0, 100), 64, torch.float32),
        ((47, 48), 9, torch.bfloat16)),
))
def test_outputs_and_states(device, lengths, chain, dtype):
    """A pass advances old states, reads committed tokens, and follows each path."""
    block, cache, projected, paths = passes([*lengths], chain, dtype)
    ours, there = copy.deepcopy(cache).to(device), copy.copy(paths)
    for name, x in vars(paths).items():
        setattr(there, name, x.to(device))
    found = delta.outputs(ours, copy.deepcopy(block).to(device), projected.to(device), there)
    expected = DeltaCache.outputs(cache, block, projected, paths)
    limit = 1e-4 if dtype == torch.float32 else 3e-2  # a value of the ring buffers may round the other way
    close = partial(torch.testing.assert_close, rtol=limit, atol=limit)
    for name in RING_BUFFERS:
        close(getattr(ours, name).cpu(), getattr(cache, name))
    close(found.cpu(), expected)
    assert torch.equal(ours.start.cpu(), cache.start) and torch.equal(cache.start, boundary_of(paths.length))
    behind = cache.start > 0
    close(ours.state.cpu()[behind], cache.state[behind])


def test_bits_do_not_depend_on_the_tree(device):
    """As a chain token by token, and as the last path of a larger tree."""
    block, cache, projected, paths = passes([33], 0, torch.float32)
    path, block = [0, 1, 3, 6, 8], block.to(device)
    whole = delta.outputs(copy.deepcopy(cache).to(device), block, projected.to(device), paths)[:, path]
    for i, node in enumerate(path):
        one = copy.copy(paths)
        one.length, one.local = paths.length + i, torch.ones(1, 1, 1, dtype=torch.bool)
        one.tap_slots = 33 + i + torch.arange(-3, 1)[None, None]
        found = delta.outputs(cache.to(device), block, projected[:, node : node + 1].to(device), one)
        assert torch.equal(found[:, 0], whole[:, i])
    assert int(cache.start) == int(boundary_of(torch.tensor(33 + 4)))
    one.length = paths.length - 16  # a free slot that is read again, a little shorter: its state stays ahead
    delta.outputs(cache, block, projected[:, :1].to(device), one)
    assert int(cache.start) == int(boundary_of(torch.tensor(33 + 4)))
