"""Published quantized checkpoints stand for the weights that their formats define."""
import re

import pytest
import torch
from helpers.refusals import refused
from helpers.sources import CONFIG, target_state, write_source
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from checkpoint.load import load_model
from common.errors import InputError
from kernels.quantized import e2m1

LAYERS, GROUP = 2, 16
SMALL = {**CONFIG, "num_hidden_layers": LAYERS}


def packed(q: torch.Tensor, bits: int, dim: int, order=None) -> torch.Tensor:
    """Whole numbers from 0 in int32 words along `dim`. order: of the values of a word."""
    count, q = 32 // bits, q.long().movedim(dim, -1)
    q = torch.nn.functional.pad(q, (0, -q.shape[-1] % count)).unflatten(-1, (-1, count))
    words = sum(q[..., k] << bits * i for i, k in enumerate(order or range(count)))
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int().movedim(-1, dim).contiguous()


def of_groups(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(GROUP, 1)


def integers(shape, bits: int, g, groups=None, dtype=torch.float16):
    """q [N, K] and zeros [N, groups] from 0, and scales [N, groups]."""
    N, groups = shape[0], groups or shape[1] // GROUP
    q, zeros = (torch.randint(1 << bits, (N, n), generator=g) for n in (shape[1], groups))
    return q, zeros, torch.rand(N, groups, generator=g).add_(0.1).div_(64).to(dtype)


def gptq(shape, g, bits=4, missing=1, act_order=False):
    q, zeros, scale = integers(shape, bits, g)
    of = torch.arange(shape[1]) // GROUP
    of = of[torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))] if act_order else of
    parts = {"qweight": packed(q.t(), bits, 0), "qzeros": packed(zeros.t(), bits, 1),
             "scales": scale.t().contiguous(), "g_idx": of.int()}
    return parts, (q - zeros[:, of] - missing) * scale.float()[:, of]


def awq(shape, g):
    q, zeros, scale = integers(shape, 4, g)
    pack = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(q.t(), 4, 1, pack), "qzeros": packed(zeros.t(), 4, 1, pack),
             "scales": scale.t().contiguous()}
    return parts, (q - of_groups(zeros)) * of_groups(scale.float())


def pack_quantized(shape, g, bits=4, asymmetric=False, dtype=torch.bfloat16):
    q, zeros, scale = integers(shape, bits, g, dtype=dtype)
    parts = {"weight_packed": packed(q, bits, 1), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    parts |= {"weight_zero_point": packed(zeros, bits, 0)} if asymmetric else {}
    return parts, (q - (of_groups(zeros) if asymmetric else 1 << bits - 1)) * of_groups(scale.float())


def w8a8(shape, g):
    q, _, scale = integers(shape, 8, g, groups=1, dtype=torch.float32)
    return {"weight": (q - 128).to(torch.int8), "weight_scale": scale}, (q - 128) * scale


def fp8(shape, g, scale: tuple, leaf="weight_scale", block=(1, 1)):
    weight = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    each = scale = torch.rand(scale, generator=g)
    if block != (1, 1):
        each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]
    return {"weight": weight, leaf: scale}, weight.float() * each


def float4(shape, g, nvfp4: bool):
    codes = torch.randint(16, shape, generator=g)
    parts = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    groups = shape[0], shape[1] // (16 if nvfp4 else 32)
    if nvfp4:
        scale, whole = torch.rand(groups, generator=g).mul(400).to(torch.float8_e4m3fn), torch.tensor([7e3])
        parts |= {"weight_scale": scale, "weight_global_scale": whole}
        scale = scale.float() / whole
    else:
        exponents = torch.randint(110, 125, groups, generator=g, dtype=torch.uint8)
        parts, scale = parts | {"weight_scale": exponents}, 2.0 ** (exponents.float() - 127)
    return parts, e2m1(codes) * scale.repeat_interleave(shape[1] // groups[1], 1)


GPTQ, CT = {"quant_method": "gptq", "bits": 4}, {"quant_method": "compressed-tensors"}
FORMATS = {
    "GPTQ": (GPTQ, gptq), "GPTQ, 8 bits": (GPTQ | {"bits": 8}, lambda s, g: gptq(s, g, 8)),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda s, g: gptq(s, g, missing=0)),
    "GPTQ, desc_act": (GPTQ | {"desc_act": True}, lambda s, g: gptq(s, g, act_order=True)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "compressed-tensors, int4": (CT | {"format": "pack-quantized"}, pack_quantized),
    "compressed-tensors, int4 with zero points": (CT, lambda s, g: pack_quantized(s, g, asymmetric=True)),
    "compressed-tensors, int8": (CT, lambda s, g: pack_quantized(s, g, 8)),
    "compressed-tensors, W8A8": (CT | {"format": "int-quantized"}, w8a8),
    "compressed-tensors, FP8 of rows": (CT, lambda s, g: fp8(s, g, (s[0], 1))),
    "compressed-tensors, FP8": (CT | {"format": "float-quantized"}, lambda s, g: fp8(s, g, (1,))),
    "MXFP4": (CT | {"format": "mxfp4-pack-quantized"}, lambda s, g: float4(s, g, False)),
    "NVFP4": (CT | {"format": "nvfp4-pack-quantized"}, lambda s, g: float4(s, g, True)),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        lambda s, g: fp8(s, g, (-(-s[0] // 24), -(-s[1] // 20)), "weight_scale_inv", (24, 20))),
}

# They are not held at their own precision, but rounded to int8.
ROUNDED = {"fp8 in blocks", "compressed-tensors, FP8", "compressed-tensors, FP8 of rows"}


def published(folder, name: str, **more):
    """A target with its projections in a format, and the weights that they stand for."""
    said, make = FORMATS[name]
    state, expected, g = target_state(SMALL), {}, torch.Generator().manual_seed(2)
    for tensor in [n for n in state if n.endswith("_proj.weight")]:
        parts, expected[tensor] = make(tuple(state.pop(tensor).shape), g)
        state |= {tensor.replace("weight", part, 1): x for part, x in parts.items()}
    state["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    return write_source(folder, state, SMALL | {"quantization_config": said | more}), expected


@pytest.mark.parametrize("name", FORMATS)
def test_published_formats(tmp_path, name):
    source, expected = published(tmp_path / "in", name)
    state = load_file(convert(source, tmp_path / "out", dtype="bf16", quiet=True) / "model.safetensors")
    model, config = load_model(convert(source, tmp_path / "stored", quiet=True))
    kinds = config.get("quantization", {}).get("kinds", {})
    assert len(kinds) == 4 * LAYERS
    for i in range(LAYERS):
        for ours, theirs in {"wqkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "wo": ("self_attn.o",),
                             "mlp.w_gate_up": ("mlp.gate", "mlp.up"), "mlp.w_down": ("mlp.down",)}.items():
            exact = torch.cat([expected[f"model.layers.{i}.{x}_proj.weight"] for x in theirs])
            assert torch.equal(state[f"layers.{i}.{ours}.weight"], exact.float().bfloat16()), ours
            stored = model.get_submodule(f"layers.{i}.{ours}").dequantize(torch.float32)
            step = exact.abs().max() * (1 / 254 + 1 / 256) if name in ROUNDED else 0
            assert (stored - exact).abs().max() <= step, ours


def part(name: str, change):
    """A change of one part of a layer."""
    return lambda state: state.update({n: change(state[n]) for n in [*state] if n.endswith(f"o_proj.{name}")})


def drop(name: str):
    return lambda state: [state.pop(n) for n in [*state] if n.endswith(f"o_proj.{name}")]


@pytest.mark.parametrize("name, change, words", [
    ("GPTQ", drop("scales"), "not a layer of gptq"),
    ("GPTQ", part("scales", lambda x: x[:1]), "qzeros is torch.int32 [4, 4], expected torch.int32 [1, 4]"),
    ("GPTQ", part("scales", lambda x: x * torch.nan), "numbers that are not finite"),
    ("GPTQ", part("qweight", torch.Tensor.float), "qweight is torch.float32"),
    ("GPTQ", part("g_idx", lambda x: x * 0), "its 64 inputs are not in 4 groups of equal size"),
    ("GPTQ", part("g_idx", lambda x: x - 1), "not a layer of gptq"),
    ("AWQ", part("qzeros", lambda x: x[:, :2]), "qzeros is torch.int32 [4, 2], expected torch.int32 [4, 4]"),
    ("compressed-tensors, int4", part("weight_shape", lambda x: x.flip(0) * 2), "weight_packed"),
    ("compressed-tensors, int4", part("weight_scale", lambda x: x[:1]), "weight_scale is torch.bfloat16"),
    ("compressed-tensors, W8A8", part("weight_scale", lambda x: x[:5]), "weight_scale is torch.float32"),
    ("compressed-tensors, FP8", drop("weight_scale"), "is not stored as floating point"),
    ("NVFP4", part("weight_global_scale", lambda x: x * 0), "not finite"),
    ("MXFP4", part("weight_scale", lambda x: x * 0 + 255), "not finite"),
    ("MXFP4", part("weight_packed", lambda x: x[:, :-1]), "weight_scale is torch.uint8"),
    ("fp8 in blocks", part("weight_scale_inv", lambda x: torch.cat((x, x))), "weight_scale_inv is"),
    ("fp8 in blocks", part("weight_scale_inv", lambda x: x / 0), "not finite"),
])
def test_parts_that_do_not_fit(tmp_path, name, change, words):
    source, _ = published(tmp_path / "in", name)
    change(state := load_file(file := source / "model.safetensors"))
    save_file({n: t.contiguous() for n, t in state.items()}, file)
    for dtype in ("keep", "bf16"):
        with pytest.raises(InputError, match=f"{re.escape(str(source))}.*{re.escape(words)}"):
            convert(source, tmp_path / "out", dtype=dtype, quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name, more, words", [
    ("GPTQ", {"bits": 3}, ": quantization_config: bits 3 is not supported; expected 2 or 4 or 8"),
    ("GPTQ", {"bits": 8}, ": model.layers.0.mlp.down_proj: not a layer of gptq (qzeros is torch.int32 [4"),
    ("AWQ", {"version": "gemv"}, ': quantization_config: version "gemv" is not supported; expected "gemm"'),
    ("AWQ", {"quant_method": "bitsandbytes"}, ': quantization_config {"quant_method": "bitsandbytes", '),
    ("NVFP4", {"format": "mxfp6-pack-quantized"}, ': quantization_config: format "mxfp6-pack-quantized" is'),
])
def test_formats_that_are_not_supported(tmp_path, name, more, words):
    source, _ = published(tmp_path / "in", name, **more)
    with refused(f"{source}{words}"):
        convert(source, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
