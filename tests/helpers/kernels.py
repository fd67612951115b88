"""Instruction sets, inputs and tolerances for kernel tests."""
import pytest
import torch

from families.gpt_oss import GptOssArgs, GptOssBlock
from kernels import isa
from kernels.quantized import MXFP4, MXFP4_GROUP, QuantizedLinear
from kernels.stored import Kind
from model import KVCache, Linear, PassInputs, gated_activation

# `make test` runs the best instruction set and AVX2, which most processors without AVX-512 have.
DEFAULT_ISAS = {isa.available()[0], "avx2"}
EACH = [pytest.param(name, marks=[pytest.mark.expensive] * (name not in DEFAULT_ISAS))
        for name in isa.available()]
DTYPES = (torch.float32, torch.bfloat16)
# Maximum error of one product / its largest value: rounding of the output.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def draws(seed: int):
    """Return a function that draws normal tensors: draw(*shape, dtype=...)."""
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=rng).to(dtype)


def close(result, expected, dtype):
    """Fail if the largest error exceeds ERROR."""
    error, limit = (result.double() - expected).abs().max(), ERROR[dtype] * expected.abs().max()
    assert error <= limit, f"the largest error is {error:.3g}, allowed is {limit:.3g} in {dtype}"


def same(result, expected):
    """Compare tensors, or collections of them, bit for bit; print the first difference."""
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def random_layer(mode: str | None, inputs: int, outputs: int, dtype: torch.dtype):
    """Return a linear layer with a bias. mode: of its weight; None: unquantized in this dtype."""
    draw = draws(inputs)
    weight, bias = draw(outputs, inputs), draw(outputs)
    if mode is None:
        layer = Linear(inputs, outputs).requires_grad_(False)
        layer.weight.data, layer.bias.data = weight, bias
        return layer.to(dtype)
    if "-" in mode:
        return stored_layer(Kind.parse(mode), weight, bias)
    if mode != MXFP4:
        return QuantizedLinear.from_weight(weight, bias, mode)
    layer = QuantizedLinear(inputs, outputs, True, mode)
    layer.weight.data = weight[:, ::2].mul(99).to(torch.int8).view(torch.uint8)
    layer.scale.data = weight[:, ::MXFP4_GROUP].mul(2).add(123).to(torch.uint8)
    layer.bias.data = bias
    return layer


def stored_layer(kind: Kind, weight, bias):
    """Return a quantized layer of random bits."""
    layer = QuantizedLinear(weight.shape[1], len(weight), True, kind)
    bits = weight.mul(1e4).to(torch.int32).to(torch.uint8)
    if kind.mode == "f8":
        bits[bits & 127 == 127] = 0  # not a number
    layer.weight.data = bits[:, : layer.weight.shape[1]].contiguous().view(layer.weight.dtype)
    largest = (8 if kind.mode == "q4" else 128) * (64 if kind.unit else 1)
    layer.scale.data = weight[:, : layer.scale.shape[1]].div(largest).contiguous()
    if kind.unit:
        layer.codes.data = bits[:, : layer.codes.shape[1]].contiguous().view(torch.int8) % 64
    if kind.ordered:
        layer.order.data = weight[0].argsort().int()
    layer.bias.data = bias
    return layer


def product(layer, x, activation: str | None):
    """Return the layer's result for x in float64, with inputs rounded as in its mode.

    activation: of a gated MLP.
    """
    quantized = not isinstance(layer, Linear)
    weight = layer.dequantize(torch.float64) if quantized else layer.weight.double()
    y = (layer.round_inputs(x.float()) if quantized else x).double() @ weight.T + layer.bias.double()
    return gated_activation(activation)(*y.chunk(2, -1)) if activation else y


class RoundedCache(KVCache):
    """A cache of k, v [B, S, nkv, hd], rounded by the function `round`."""

    def __init__(self, k, v, round):
        torch.nn.Module.__init__(self)
        self.k, self.v, self.round = round(k), round(v), round

    def write(self, k, v, slots):
        rows = torch.arange(len(slots))[:, None]
        self.k[rows, slots], self.v[rows, slots] = self.round(k), self.round(v)

    def live(self, count, dtype):
        return self.k[:, :count].transpose(1, 2), self.v[:, :count].transpose(1, 2)


def round_heads(x):
    """Round each head of x [..., hd] to multiples of its largest value / 127."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


def attention_case(dtype, B, T, heads, kv_heads, hd, n, more=False, window=0):
    """Return a block, qkv of T tokens, a cache's k and v, and a pass that attends to n slots.

    more: with head norms and sinks.
    """
    draw = draws(n)
    shape = 8, 8, 8, 1, heads, kv_heads, hd
    args = GptOssArgs(*shape, qk_norm=more, windows=(window,), sinks=more)
    block = GptOssBlock(args).requires_grad_(False)
    for p in block.parameters():
        p.data = draw(*p.shape, dtype=dtype)
    if more:  # from almost none to almost all of the softmax
        block.sinks.data = torch.linspace(-20, 40, heads)
    qkv = draw(B, T, (heads + 2 * kv_heads) * hd, dtype=dtype)
    k, v = (draw(B, n + 3, kv_heads, hd, dtype=dtype) for _ in range(2))
    slots = torch.stack([draw(n).argsort()[:T] for _ in range(B)])
    visible = (draw(B, T, n) > -0.5).scatter(2, slots[..., None], True)  # a token attends to itself
    return block, qkv, k, v, PassInputs(args, args.inverse_frequencies(), slots + 100, slots, visible)


def check_attention(case, result, caches, coarse: bool):
    """Compare attention, and unquantized caches, with the definition in float64.

    For 8-bit caches (caches is None) the reference uses rounded keys and values; the tolerance covers
    rounding of queries and softmax weights: about 1/8000 of the largest value if they have 16 bits, 1/127
    (`coarse`) if they have 8.
    """
    block, qkv, k, v, shared = case
    cache = RoundedCache(k.double(), v.double(), round_heads if caches is None else lambda x: x)
    expected = cache.attend(block.double(), qkv.double(), shared)
    error = (result.double() - expected).abs() / expected.abs().max()
    max_error, rms_error = (0.05, 0.012) if coarse else (0.012, 0.003)
    if caches is not None:
        max_error = rms_error = 2 * ERROR[qkv.dtype]
        close(caches[0], cache.k, qkv.dtype), same(caches[1].double(), cache.v)
    rms = error.square().mean().sqrt()
    assert error.max() <= max_error and rms <= rms_error, f"errors: {error.max():.3g}, rms {rms:.3g}"
