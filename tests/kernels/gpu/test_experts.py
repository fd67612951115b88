"""Mixture-of-experts kernels (one per projection) against PyTorch."""
import copy
from itertools import cycle

import pytest
import torch
from helpers.ahead_of_time import expensive

from families.experts import Experts, MixtureArgs
from kernels.gpu import experts, products
from kernels.gpu.device import INTERPRETED
from kernels.gpu.products import kernel_operands
from kernels.scheme import AS_STORED, Scheme, replace_linears

# Where the interpreter should round to bfloat16 it cuts off.
DTYPES = [(torch.float32, 3e-6), (torch.float16, 8e-3), (torch.bfloat16, 2e-2)]
WEIGHTS = [
    Scheme(None, 0, None), Scheme("int8", 0, None), Scheme("w8a8", 0, None), Scheme(None, 0, None, "mxfp4"),
    *(Scheme(AS_STORED, 0, None, None, dict.fromkeys(("w_gate_up", "w_down"), kind))
      for kind in ("q4-32-row-min", "q4-32-0", "q6-16-0-min", "q8-32-0", "f8-32-0")),
]
# Each dtype with each weights, on a GPU; in the interpreter, which is slow, all of both.
CASES = [(*dtype, scheme) for dtype in DTYPES for scheme in WEIGHTS]
if INTERPRETED:
    CASES = [(*dtype, scheme) for dtype, scheme in zip(cycle(DTYPES), WEIGHTS)]
E, A, H, INNER = 7, 3, 192, 96  # tiles divide neither


def mixture(scheme, dtype, inner=INNER, **options) -> Experts:
    """Return random experts."""
    layer = Experts(MixtureArgs(8, H, inner, 1, 1, 1, 8, num_experts=E, experts_per_token=A, **options))
    torch.manual_seed(0)
    for x in layer.parameters():
        x.normal_(std=x.shape[-1] ** -0.5)
    layer.to(dtype)
    if scheme.mode or scheme.experts:
        replace_linears(layer, scheme)
        for stack in (layer.w_gate_up, layer.w_down):
            stack.weight.random_(*(0, 256) if stack.weight.dtype == torch.uint8 else (-128, 128))
            if scheme.experts:
                stack.scale.random_(118, 124)
            else:
                stack.scale.copy_((0.5 + torch.rand(stack.scale.shape)) * stack.inputs**-0.5 / 64)
            if stack.mode == "f8":
                stack.weight[stack.weight & 127 == 127] = 0  # not a number
            if len(stack.scales) > 1:
                stack.codes.random_(1, 128), stack.scale.div_(64)
    return layer.requires_grad_(False)


def ours(layer, device):
    experts.fuse(layer := copy.deepcopy(layer).to(device))
    assert layer.fused is experts.fused_mix
    return layer


@pytest.mark.parametrize("dtype, limit, scheme", CASES, ids=str)
@pytest.mark.parametrize("biases, rows", ((True, 40), *expensive((False, 1), (True, 3), (False, 130))))
def test_products(device, dtype, limit, scheme, biases, rows):
    """Few rows, and rows for several tiles."""
    layer = mixture(scheme, dtype, biases=biases, activation="clamped_swiglu" if biases else "silu")
    x = torch.randn(2, rows, H, generator=torch.Generator().manual_seed(rows)).to(dtype)[:1]
    want = copy.deepcopy(layer).float()(x.float(), None)
    fused, some = ours(layer, device), torch.tensor([E - 1, 0])
    if scheme.mode or scheme.experts:  # the weights of experts for PyTorch
        found = fused.w_down.dequantize(torch.float32, some.to(device)).cpu()
        assert torch.equal(found, layer.w_down.dequantize(torch.float32, some))
    found = fused(x.to(device), None).cpu()
    assert found.dtype == dtype
    if scheme.mode in ("w8a8", AS_STORED):  # what is near a tie is rounded to another step of 127
        limit = max(limit, 8e-3)
    assert float((found.float() - want).abs().max() / want.abs().max()) < limit


def test_every_value(device):
    """Each e2m1 value times each scale is exact, including the smallest and the largest."""
    codes, count = torch.arange(16, dtype=torch.uint8), 32
    layer = mixture(WEIGHTS[3], torch.float32, 64)
    layer.w_down.weight.copy_((codes | codes.flip(0) << 4).repeat(2))
    powers = torch.tensor([0, 1, 2, 100, 127, 200, 254], dtype=torch.uint8)
    layer.w_down.scale.copy_(powers[:, None, None])
    values, stack = layer.w_down.dequantize(torch.float32), ours(layer, device).w_down
    slots = experts.sort_assignments(torch.arange(E, device=device).repeat_interleave(count)[:, None], E, 16)
    x = torch.eye(64, device=device)[:count].repeat(E, 1)
    y = products.linear(*kernel_operands(stack, x), None, order=slots[0], tiles=slots[1], block=16)[0]
    assert torch.equal(y.cpu().view(E, count, H), values[..., :count].transpose(1, 2))


@pytest.mark.parametrize("rows, used, tall", [(1, 3, 16), (2, 2, 16), (60, 3, 16), (5, 2, 2), (90, 1, 32)])
@pytest.mark.parametrize("skewed", (False, True))
def test_sort_assignments(device, monkeypatch, rows, used, tall, skewed):
    """Every assignment is in exactly one tile of its expert. Skewed: most rows choose one expert, and few
    another.
    """
    monkeypatch.setattr(experts, "SORT_CHUNK", 32)
    scores = torch.rand(rows, E, generator=torch.Generator().manual_seed(rows))
    scores[:, 4] += 2 * skewed
    scores[:, 2] -= 2 * skewed
    chosen = scores.topk(used).indices
    order, tiles = (x.cpu() for x in experts.sort_assignments(chosen.to(device), E, tall))
    assert len(tiles) == min(rows * used, E + rows * used // tall)
    found = []
    for expert, first, end in tiles.tolist():
        slots = order[first : min(first + tall, end)]
        assert (chosen.flatten()[slots] == expert).all()
        found += slots.tolist()
    assert sorted(found) == list(range(rows * used))


def test_one_graph_for_every_routing(device):
    """Shapes do not depend on the routing; `torch.compile` sees each operation as one node."""
    layer = ours(mixture(WEIGHTS[1], torch.float32), device)
    x, chosen = torch.randn(5, H, device=device), torch.arange(15, device=device).view(5, 3) % E
    slots, checks = experts.sort_assignments(chosen, E, 16), ("test_schema", "test_faketensor")
    torch.library.opcheck(experts.sort_assignments, (chosen, E, 16), test_utils=checks)
    options = {"order": slots[0], "tiles": slots[1], "block": 16}
    torch.library.opcheck(products.linear, kernel_operands(layer.w_gate_up, x), options, test_utils=checks)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(1, 5, H, device=device)
        assert torch.equal(compiled(x, x), layer(x, x))
