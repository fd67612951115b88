"""Matmuls with quantized weights, and those of dense layers over few tokens, against float64."""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers.ahead_of_time import expensive
from helpers.kernels import random_layer

from kernels.gpu import dense, products
from kernels.gpu.launch import arrival_counters
from kernels.quantized import QuantizedLinear
from kernels.stored import Kind

# Where the interpreter should round to bfloat16 it cuts off.
DTYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
ROUNDED = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
WEIGHTS = "int8", "q4-32-0", "q4-64-0", "q4-128-0"
CASES = [  # rows, mode, outputs and inputs, also those that no tile divides
    (60, "int8", 75, 384), (60, "q4-64-0", 75, 384), (3, "q4-32-0", 75, 384), (3, "q4-128-0", 75, 384),
    (5, "int8", 33, 95), (5, "int8", 1, 130), (5, "q4-32-0", 33, 96), (5, "q4-64-0", 7, 192),
    (3, "w8a8", 40, 256), (3, "q4-32-row-min", 40, 256), (3, "q6-16-256-min", 40, 256),
    (5, "q6-16-0", 33, 96), (17, "q8-32-0-min", 33, 96), (3, "f8-128-0", 40, 256), (3, "q8-128-0", 40, 256),
    (3, "q4-32-0-min-order", 40, 96),
    *expensive(*((rows, mode, 75, 384) for mode in WEIGHTS for rows in (1, 17, 60, 130))),
]


def case(device, dtype, mode, rows, N, K, bias=True):
    """Return a layer [K] -> [N], inputs [rows, K] and a residual stream [rows, N]."""
    draw = torch.Generator().manual_seed(rows * 1000 + N + K)
    layer = random_layer(mode, K, N, dtype)
    layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False) if bias else None
    layer.exact = layer.dequantize(torch.float64).to(device)
    x, onto = (torch.randn(rows, n, generator=draw).to(device, dtype) for n in (K, N))
    products.fuse(layer.to(device))
    return layer, x, onto


def exactly(layer, x):
    """Return the product in float64, with x rounded as the mode does."""
    y = layer.round_inputs(x).double() @ layer.exact.T
    return y if layer.bias is None else y + layer.bias.double()


def error(found, want):
    """Return the largest error relative to the largest value."""
    return float((found.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype, limit", DTYPES)
@pytest.mark.parametrize("rows, mode, N, K", CASES)
def test_products(device, dtype, limit, rows, mode, N, K):
    """Results are rounded once, like elsewhere: before the residual is added; logits stay in float32."""
    layer, x, onto = case(device, dtype, mode, rows, N, K)
    want, alone, both, logits = exactly(layer, x), layer(x), layer(x, onto), layer.logits(x)
    assert error(alone, want) < limit and error(both, want + onto.double()) < limit
    assert logits.dtype == torch.float32 and error(logits, want) < 2e-6
    if dtype in ROUNDED:
        assert torch.equal(alone, logits.to(dtype)) and torch.equal(both, onto + alone)


@pytest.mark.parametrize("mode", ("int8", Kind("q4", 64), Kind("q6", 16), Kind("q8", 32), Kind("f8", 32)))
def test_every_value(device, mode):
    """Each stored value is dequantized exactly: the inputs are one-hot."""
    K = 256
    layer = QuantizedLinear(K, 64, False, mode)
    layer.weight.data = torch.arange(layer.weight.numel()).reshape(layer.weight.shape).to(layer.weight.dtype)
    layer.scale.data.fill_(1)
    if layer.mode == "f8":
        layer.weight.data[layer.weight & 127 == 127] = 0  # not a number
    exact, values = layer.weight.data.clone(), layer.dequantize(torch.float32).T.to(device)
    products.fuse(layer.to(device))
    assert torch.equal(layer.dequantize(torch.float32).T, values)
    assert torch.equal(products.restore(layer, layer.weight, layer.scale)[0].cpu(), exact)
    for dtype, _ in DTYPES:
        some = torch.tensor([0, 1, 126, 127, 128, 200, 255])
        x = torch.eye(K)[some].to(device, dtype)
        assert torch.equal(layer(x).float(), values[some.to(device)])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("mode, bits", [("int8", 8), ("q4-64-0", 4)])
def test_split_k(device, dtype, mode, bits):
    """Few columns and many inputs (split-K): partial sums are added in a fixed order."""
    layer, x, _ = case(device, dtype, mode, 3, 64, 4096, bias=False)
    tile = products.tile_config(16, dtype, bits, 1 << 17)[0].kwargs
    assert tile["BLOCK_N"] == 64 and 4096 // tile["BLOCK_K"] >= 2 * products.MIN_STEPS
    found = layer(x)
    assert error(found, exactly(layer, x)) < (2e-2 if dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(layer(x), found)
    assert not arrival_counters(found.device, 1).any()


def test_shapes_and_layouts(device):
    """Any number of dimensions, and rows that are not contiguous."""
    layer, x, onto = case(device, torch.float32, "int8", 12, 20, 64)
    together = layer(x, onto)
    assert torch.equal(layer(x.view(2, 6, 64), onto.view(2, 6, 20)), together.view(2, 6, 20))
    assert torch.equal(layer(x[::2], onto[::2]), together[::2])


def test_one_node(device):
    """`torch.compile` sees one operation with the right dtype and shape."""
    layer, x, onto = case(device, torch.bfloat16, "int8", 4, 20, 64)
    for to in (onto, None):
        torch.library.opcheck(
            products.linear,
            (x, layer.weight, layer.scale, None, None, 20, 8, False, 0, layer.bias, to),
            test_utils=("test_schema", "test_faketensor"),
        )
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, onto), layer(x, onto))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("rows", (1, 60, 300))
def test_fp8(device, dtype, rows):
    layer, x, _ = case(device, dtype, "fp8", rows, 208, 256)
    assert error(layer(x), exactly(layer, x)) < 0.08
    assert layer.logits(x).dtype == torch.float32 and error(layer.logits(x), exactly(layer, x)) < 0.08


# -- the products of a dense target over few tokens, against their definition in float64 ---------------------


DENSE_DTYPES = [torch.float32] if not torch.cuda.is_available() else [torch.bfloat16, torch.float16]


def difference(found, expected) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DENSE_DTYPES)
@pytest.mark.parametrize("tokens", (1, 5, 16))
@pytest.mark.parametrize("width, hidden", ((256, 512), (576, 192)))  # BLOCK_K divides one of them
def test_the_four_products_of_a_layer(device, dtype, tokens, width, hidden):
    draw = torch.Generator().manual_seed(width + tokens)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=draw) * scale).to(device, dtype)

    attended, stream, norm, next_norm = (
        random(tokens, hidden), random(tokens, width), random(width), random(width))
    wo, gate_up = random(width, hidden, scale=hidden**-0.5), random(2 * hidden, width, scale=width**-0.5)
    wqkv, bias, eps = random(128, width, scale=width**-0.5), random(128), 1e-5

    x, weighted, squares = dense.product(attended, wo, None, stream, None, norm)
    gated, *empty = dense.product(weighted, gate_up, None, None, squares, eps=eps, gated=True)
    x2, weighted2, squares2 = dense.product(gated, wo, None, x, None, next_norm)
    qkv, *_ = dense.product(weighted2, wqkv, bias, None, squares2, eps=eps)

    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    want = stream.double() + attended.double() @ wo.double().T
    assert difference(x, want) < limit
    normed = F.rms_norm(x.double(), (width,), norm.double(), eps)  # each from the kernel's own input
    gate, up = (normed @ gate_up.double().T).chunk(2, -1)
    assert difference(gated, F.silu(gate) * up) < limit
    assert difference(x2, x.double() + gated.double() @ wo.double().T) < limit
    normed = F.rms_norm(x2.double(), (width,), next_norm.double(), eps)
    assert difference(qkv, normed @ wqkv.double().T + bias.double()) < limit
    assert all(len(each) == 0 for each in empty)
    options = {"block": 16, "norm": norm}
    torch.library.opcheck(
        products.linear, (attended, wo, None, None, None, width, 16, False, 0), options,
        test_utils=("test_schema", "test_faketensor"),
    )
