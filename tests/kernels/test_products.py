"""Linear layers and norms against plain PyTorch in float64.

A row's result never depends on its company, nor on who else calls.
"""
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import DTYPES, close, draws, same

from kernels.cpu import CpuBackend
from kernels.packed import FLOAT32, GATES, SAME, Packed, PackedLinear, pack, pack_scale
from kernels.quantized import QuantizedLinear, QuantizedStack, round_inputs
from model import ACTIVATIONS

pytestmark = pytest.mark.kernels


def linear(isa, x, packed, columns, scale=None, bias=None, onto=None, mode=SAME):
    return isa.ops.linear(x, packed, scale, bias, onto, columns, mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", (1, 31, 32, 75))
@pytest.mark.parametrize("rows", (1, 5, 13, 40))
def test_linear(each_isa, dtype, columns, rows):
    draw = draws(rows)
    x, weight, bias = draw(2, rows, 38, dtype=dtype), draw(columns, 38, dtype=dtype), draw(columns)
    onto = draw(2, rows, columns, dtype=dtype)
    packed, expected = pack(each_isa, weight, None, dtype), x.double() @ weight.double().T
    close(linear(each_isa, x, packed, columns), expected, dtype)
    with_bias = linear(each_isa, x, packed, columns, None, pack_scale(each_isa, bias[:, None]), onto)
    close(with_bias, expected + bias + onto, dtype)
    exact = linear(each_isa, x, packed, columns, mode=FLOAT32)
    assert exact.dtype == torch.float32
    close(exact, expected, torch.float32)
    other = linear(each_isa, x.transpose(0, 1), packed, columns)
    same(other, linear(each_isa, x, packed, columns).transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", (16, 24, 100))
@pytest.mark.parametrize("activation", GATES)
def test_gated(each_isa, dtype, activation, inner):
    draw = draws(inner)
    x, weight, bias = draw(3, 7, 38, dtype=dtype) * 3, draw(2 * inner, 38, dtype=dtype), draw(2 * inner)
    gate, up = (x.double() @ weight.double().T + bias).chunk(2, -1)
    assert max(gate.max(), up.max(), -up.min()) > 7  # what clamped_swiglu limits
    packed, with_bias = pack(each_isa, weight, None, dtype, True), pack_scale(each_isa, bias[:, None], True)
    found = linear(each_isa, x, packed, inner, bias=with_bias, mode=GATES[activation])
    close(found, ACTIVATIONS[activation](gate, up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode, inputs, group", (
    ("int8", 128, 0), ("int4", 128, 32), ("int4", 128, 64), ("w8a8", 128, 0), ("w8a8", 100, 0),
    ("w4a8", 96, 32), ("w4a8", 192, 64), ("w4a8", 256, 128),
))
@pytest.mark.parametrize("rows", (1, 3, 7, 21))
@pytest.mark.parametrize("gated", (False, True))
def test_quantised(each_isa, dtype, mode, inputs, group, rows, gated):
    """Exactly the product of what x is rounded to (w8a8, w4a8) with the weight that the quantised one stands
    for, and row-invariant.
    """
    draw = draws(rows)
    layer = QuantizedLinear.of(draw(90, inputs), mode, group)
    x, onto = draw(rows, inputs, dtype=dtype), draw(rows, 45 if gated else 90, dtype=dtype)
    x[0, :64] = 0
    read = round_inputs(x.float(), group or 64) if mode in ("w8a8", "w4a8") else x
    expected = read.double() @ layer.dequantize(torch.float64).T
    packed = PackedLinear(each_isa, layer, dtype, "silu" if gated else None)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    else:
        close(packed.logits(x), expected, torch.float32)
    whole = packed(x)
    close(whole, expected, dtype)
    close(packed(x, onto), expected + onto, dtype)
    assert all(torch.equal(packed(x[i : i + 2]), whole[i : i + 2]) for i in range(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 3, 7, 21))
@pytest.mark.parametrize("activation", (None, "clamped_swiglu"))
def test_mxfp4(each_isa, dtype, rows, activation):
    """Exactly the product with what the four bits stand for, of every expert, and row-invariant."""
    generator, draw = torch.Generator().manual_seed(rows), draws(rows)
    stack = QuantizedStack((2, 90, 96), "mxfp4", 32)
    stack.weight.data = torch.randint(256, (2, 90, 48), generator=generator, dtype=torch.uint8)
    stack.scale.data = torch.randint(120, 131, (2, 90, 3), generator=generator, dtype=torch.uint8)
    x, bias = draw(rows, 96).mul(0.1).to(dtype), draw(2, 90)
    packed = Packed(each_isa, stack, bias, dtype, activation)
    of_expert = len(packed.packed) // 2
    for e in range(2):
        expected = x.double() @ stack(None, torch.float64)[e].T + bias[e]
        expected = ACTIVATIONS[activation](*expected.chunk(2, -1)) if activation else expected
        operands = [part[e * of_expert : (e + 1) * of_expert] for part in packed.operands]
        args = *operands, None, packed.columns, packed.mode
        whole = each_isa.ops.linear(x, *args)
        close(whole, expected, dtype)
        assert all(torch.equal(each_isa.ops.linear(x[[i]], *args), whole[[i]]) for i in range(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 16, 50, 576))
def test_rms_norm(each_isa, dtype, size):
    draw = draws(size)
    x, weight = draw(2, 5, size, dtype=dtype), draw(size)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    close(each_isa.ops.rms_norm(x, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_never_depends_on_its_company(each_isa, dtype):
    """Bit for bit: any subset of rows, any number of threads."""
    draw = draws(3)
    x, weight, norm = draw(40, 96, dtype=dtype), draw(70, 96, dtype=dtype), draw(96)
    packed, gated = (pack(each_isa, weight, None, dtype, both) for both in (False, True))
    for compute in (
        lambda x: linear(each_isa, x, packed, 70), lambda x: linear(each_isa, x, packed, 70, mode=FLOAT32),
        *(lambda x, mode=mode: linear(each_isa, x, gated, 35, mode=mode) for mode in GATES.values()),
        lambda x: each_isa.ops.rms_norm(x, norm, 1e-6),
    ):
        whole = compute(x)
        for first in range(40):
            for count in (1, 2, 3, 7, 8, 11, 12, 13, 25):
                same(compute(x[first : first + count]), whole[first : first + count])
        torch.set_num_threads(3)
        threaded = compute(x)
        torch.set_num_threads(1)
        same(threaded, whole)


@pytest.fixture
def multiply():
    """A product that several threads share."""
    kernels, draw = CpuBackend.load(), draws(1)
    x, packed = draw(5, 256), pack(kernels, draw(900, 256), None, torch.float32)
    return lambda: linear(kernels, x, packed, 900)


def test_callers_side_by_side(multiply):
    """Several threads of Python call at once, and the number of threads changes meanwhile."""
    expected = multiply()
    torch.set_num_threads(3)

    def work(seed):
        return all(torch.equal(multiply(), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, i) for i in range(8)]
        for count in (2, 5, 3, 1):
            torch.set_num_threads(count)
            same(multiply(), expected)
        assert all(result.result(timeout=120) for result in results)
    torch.set_num_threads(1)


def test_a_forked_process_has_threads_of_its_own(multiply):
    torch.set_num_threads(2)
    expected = multiply()
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(multiply(), expected) else 1)
    torch.set_num_threads(1)
    assert os.waitpid(child, 0)[1] == 0
