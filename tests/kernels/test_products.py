"""Linear layers and norms against PyTorch in float64.

Results are batch-invariant, and independent of concurrent callers.
"""
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import DTYPES, close, draws, product, random_layer, same

from kernels.cpu import CpuBackend
from kernels.packed import GATES, PackedLinear
from kernels.quantized import QuantizedLinear
from kernels.stored import values

pytestmark = pytest.mark.kernels
STORED = (
    ("q4-32-0", 96), ("q4-64-0", 192), ("q4-128-0-min", 128), ("q4-32-row-min", 192), ("q4-32-256-min", 512),
    ("q8-16-0-min", 96), ("q8-32-0", 96), ("q8-16-256-min", 512), ("q6-16-256", 256), ("q6-16-0-min", 96),
    ("q6-32-256-min", 512), ("q8-16-row", 160),
)


def check_batch_invariant(compute, x) -> None:
    """Assert that subsets of the rows of x [n, K], other layouts and thread counts give the same bits."""
    whole, n = compute(x), len(x)
    for count in (1, 2, 3, 7, 8, 11, 12, 13, 25):
        for first in {0, 1, 5, n // 2, n - count}:
            same(compute(x[first : first + count]), whole[first : first + count])
    same(compute(x.T.contiguous().T), whole)
    torch.set_num_threads(3)
    threaded = compute(x)
    torch.set_num_threads(1)
    same(threaded, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode, inputs", (
    (None, 38), (None, 96), ("int8", 128), ("w8a8", 128), ("w8a8", 100), ("mxfp4", 96), *STORED,
    ("q4-32-0-min-order", 96),
))
@pytest.mark.parametrize("rows, columns, activation", (
    (1, 31, None), (5, 1, None), (13, 16, None), (21, 45, None), (40, 75, None),
    *zip((1, 13, 40), (31, 16, 75), GATES),
))
def test_products(each_isa, dtype, activation, mode, inputs, rows, columns):
    """Equal to the product of the quantized inputs and the dequantized weight."""
    layer = random_layer(mode, inputs, columns * (1 if activation is None else 2), dtype)
    packed, draw = PackedLinear(each_isa, layer, dtype, activation), draws(rows)
    x, residual = draw(2, rows, inputs).mul(0.3).to(dtype), draw(2, rows, columns, dtype=dtype)
    x[0, 0, :64] = 0
    expected = product(layer, x, activation)
    close(packed(x), expected, dtype)
    close(packed(x, residual), expected + residual, dtype)
    check_batch_invariant(packed, x.flatten(0, 1))
    if activation is None:
        assert packed.logits(x).dtype == torch.float32
        close(packed.logits(x), expected, torch.float32)
        check_batch_invariant(packed.logits, x.flatten(0, 1))


@pytest.mark.parametrize("rows", (1, 6, 40))
@pytest.mark.parametrize("mode, inputs", [case for case in STORED if case[0].startswith("q6")])
def test_q6_equals_q8_with_the_same_values(each_isa, mode, inputs, rows):
    layer, x = random_layer(mode, inputs, 75, torch.float32), draws(rows)(rows, inputs)
    q6_output = PackedLinear(each_isa, layer, torch.float32)(x)
    q8_layer = QuantizedLinear(inputs, 75, False, layer.kind._replace(mode="q8"))
    layer.weight.data = values(layer.kind, layer.weight)
    q8_layer.load_state_dict(layer.state_dict(), strict=False)
    q8_layer.bias = layer.bias
    same(q6_output, PackedLinear(each_isa, q8_layer, torch.float32)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode, inputs", STORED)
def test_embeddings_equal_dequantized_rows(each_isa, dtype, mode, inputs):
    layer, tokens = random_layer(mode, inputs, 75, dtype), torch.tensor([[74, 0, 31], [32, 5, 64]])
    codes, minima = layer.codes if layer.kind.unit else None, layer.kind.minima
    table = torch.empty(0, inputs, dtype=dtype), layer.weight, layer.scale, codes, minima
    same(each_isa.ops.embed(tokens, *table), layer.dequantize(dtype, tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 16, 50, 576))
def test_rms_norm(each_isa, dtype, size):
    x, weight = draws(size)(40, size, dtype=dtype), draws(1)(size)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    close(each_isa.ops.rms_norm(x, weight, 1e-5), expected, dtype)
    check_batch_invariant(lambda x: each_isa.ops.rms_norm(x, weight, 1e-5), x)


@pytest.fixture
def multiply():
    """A matmul shared by several threads."""
    packed = PackedLinear(CpuBackend.load(), random_layer(None, 256, 900, torch.float32), torch.float32)
    return lambda: packed(draws(1)(5, 256))


def test_concurrent_callers(multiply):
    """Python threads call concurrently while the number of kernel threads changes."""
    expected = multiply()
    torch.set_num_threads(3)

    def call_repeatedly(_):
        return all(torch.equal(multiply(), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(call_repeatedly, i) for i in range(8)]
        for count in (2, 5, 3, 1):
            torch.set_num_threads(count)
            same(multiply(), expected)
        assert all(result.result(timeout=120) for result in results)
    torch.set_num_threads(1)


def test_forked_process_computes(multiply):
    torch.set_num_threads(2)
    expected = multiply()
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(multiply(), expected) else 1)
    torch.set_num_threads(1)
    assert os.waitpid(child, 0)[1] == 0
