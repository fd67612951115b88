"""Published quantized checkpoints are read as the numbers that their formats define."""
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers.kernels import draws, same
from helpers.sources import CONFIG, target_state, write_source
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from checkpoint.gguf import UNQUANTIZED
from checkpoint.hybrid import rearranged
from checkpoint.load import load_model
from checkpoint.source import Entry, Grouped
from common.errors import InputError
from kernels.quantized import e2m1
from kernels.stored import ROUNDED, Kind, numbers, pack_values, regroup, round_groups

LAYERS, GROUP = 2, 16
SMALL = {**CONFIG, "num_hidden_layers": LAYERS}


def packed(q: torch.Tensor, bits: int, dim: int, order=None) -> torch.Tensor:
    """Pack unsigned integers into int32 words along `dim`. order: of the values in a word."""
    count, q = 32 // bits, q.long().movedim(dim, -1)
    q = torch.nn.functional.pad(q, (0, -q.shape[-1] % count)).unflatten(-1, (-1, count))
    words = sum(q[..., k] << bits * i for i, k in enumerate(order or range(count)))
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int().movedim(-1, dim).contiguous()


def of_groups(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(GROUP, 1)


def integers(shape, bits: int, g, groups=None, dtype=torch.float16):
    """Return q [N, K] and zeros [N, groups], unsigned, and scales [N, groups]."""
    N, groups = shape[0], groups or shape[1] // GROUP
    q, zeros = (torch.randint(1 << bits, (N, n), generator=g) for n in (shape[1], groups))
    return q, zeros, torch.rand(N, groups, generator=g).add_(0.1).div_(64).to(dtype)


def gptq(shape, g, bits=4, missing=1, act_order=False, symmetric=False, dtype=torch.float16):
    q, zeros, scale = integers(shape, bits, g, dtype=dtype)
    zeros = torch.full_like(zeros, (1 << bits - 1) - missing) if symmetric else zeros
    of = torch.arange(shape[1]) // GROUP
    of = of[torch.randperm(shape[1], generator=torch.Generator().manual_seed(1))] if act_order else of
    parts = {"qweight": packed(q.t(), bits, 0), "qzeros": packed(zeros.t(), bits, 1),
             "scales": scale.t().contiguous(), "g_idx": of.int()}
    return parts, (q - zeros[:, of] - missing) * scale.float()[:, of]


def awq(shape, g, dtype=torch.float16):
    q, zeros, scale = integers(shape, 4, g, dtype=dtype)
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


def float4(shape, g, nvfp4: bool, modelopt=False):
    codes = torch.randint(16, shape, generator=g)
    parts = {"weight" if modelopt else "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    groups = shape[0], shape[1] // (16 if nvfp4 else 32)
    if nvfp4:
        scale, whole = torch.rand(groups, generator=g).mul(400).to(torch.float8_e4m3fn), torch.tensor([7e3])
        parts |= {"weight_scale": scale}
        parts |= {"weight_scale_2": 1 / whole[0]} if modelopt else {"weight_global_scale": whole}
        scale = scale.float() * (1 / whole) if modelopt else scale.float() / whole
    else:
        exponents = torch.randint(110, 125, groups, generator=g, dtype=torch.uint8)
        parts, scale = parts | {"weight_scale": exponents}, 2.0 ** (exponents.float() - 127)
    return parts, e2m1(codes) * scale.repeat_interleave(shape[1] // groups[1], 1)


GPTQ, CT = {"quant_method": "gptq", "bits": 4}, {"quant_method": "compressed-tensors"}
AWQ, MODELOPT = {"quant_method": "awq", "bits": 4, "version": "gemm"}, {"quant_method": "modelopt"}
FORMATS = {
    "GPTQ": (GPTQ, gptq), "GPTQ, 2 bits": (GPTQ | {"bits": 2}, lambda s, g: gptq(s, g, 2)),
    "GPTQ, 8 bits": (GPTQ | {"bits": 8}, lambda s, g: gptq(s, g, 8)),
    "GPTQ, symmetric": (GPTQ | {"sym": True}, lambda s, g: gptq(s, g, symmetric=True)),
    "GPTQ, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda s, g: gptq(s, g, missing=0)),
    "GPTQ, desc_act": (GPTQ | {"desc_act": True}, lambda s, g: gptq(s, g, act_order=True)),
    "GPTQ, desc_act, scales in float32": (
        GPTQ | {"desc_act": True}, lambda s, g: gptq(s, g, act_order=True, dtype=torch.float32)),
    "AWQ": (AWQ, awq), "AWQ, scales in float32": (AWQ, lambda s, g: awq(s, g, torch.float32)),
    "compressed-tensors, int4": (CT | {"format": "pack-quantized"}, pack_quantized),
    "compressed-tensors, int4 with zero points": (CT, lambda s, g: pack_quantized(s, g, asymmetric=True)),
    "compressed-tensors, int4 with zero points, scales in float32": (
        CT, lambda s, g: pack_quantized(s, g, asymmetric=True, dtype=torch.float32)),
    "compressed-tensors, int8": (CT, lambda s, g: pack_quantized(s, g, 8)),
    "compressed-tensors, int8 with zero points": (CT, lambda s, g: pack_quantized(s, g, 8, asymmetric=True)),
    "compressed-tensors, W8A8": (CT | {"format": "int-quantized"}, w8a8),
    "compressed-tensors, FP8 of rows": (CT, lambda s, g: fp8(s, g, (s[0], 1))),
    "compressed-tensors, FP8": (CT | {"format": "float-quantized"}, lambda s, g: fp8(s, g, (1,))),
    "MXFP4": (CT | {"format": "mxfp4-pack-quantized"}, lambda s, g: float4(s, g, False)),
    "NVFP4": (CT | {"format": "nvfp4-pack-quantized"}, lambda s, g: float4(s, g, True)),
    "ModelOpt, FP8": (MODELOPT | {"quant_algo": "FP8"}, lambda s, g: fp8(s, g, ())),
    "ModelOpt, NVFP4": (MODELOPT | {"quant_algo": "NVFP4"}, lambda s, g: float4(s, g, True, True)),
    "fp8 in blocks of 32": (
        {"quant_method": "fp8", "weight_block_size": [24, 32]},
        lambda s, g: fp8(s, g, (-(-s[0] // 24), s[1] // 32), "weight_scale_inv", (24, 32))),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        lambda s, g: fp8(s, g, (-(-s[0] // 24), -(-s[1] // 20)), "weight_scale_inv", (24, 20))),
}

MIXED = {  # types of matrices, as a Gemma 3 in Q4_K_M has them
    "attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q4_K", "ffn_gate": "Q5_0",
    "ffn_up": "Q5_0", "ffn_down": "Q6_K", "token_embd": "Q8_0"}
OURS = {"layers.0.wqkv": ("attn_q", "attn_k", "attn_v"), "layers.0.wo": ("attn_output",),
        "layers.0.mlp.w_gate_up": ("ffn_gate", "ffn_up"), "layers.0.mlp.w_down": ("ffn_down",),
        "embed": ("token_embd",)}
KINDS = {"layers.0.wqkv": "q8-32-0-min", "layers.0.wo": "q4-32-256-min", "layers.0.mlp.w_gate_up": "q6-32-0",
         "layers.0.mlp.w_down": "q6-16-256", "embed": "q8-32-0"}
GGUF = [kind.name for kind in gguf.quants._type_traits if kind.name not in UNQUANTIZED]
# No kind holds them.
ROUNDED_TYPES = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "fp8 in blocks"}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Return rows of random quantized blocks whose values are finite."""
    size, in_bytes = gguf.GGML_QUANT_SIZES[kind]
    count, draw = rows * columns // size, np.random.default_rng(rows)
    blocks = draw.integers(0, 256, (2 * count + 64, in_bytes), np.uint8)
    if kind.name == "NVFP4":
        blocks[:, :4] &= 127  # scales have no sign
    with np.errstate(all="ignore"):
        largest = np.abs(gguf.quants.dequantize(blocks, kind)).max(-1)
    return blocks[(largest > 1e-20) & (largest < 1e20)][:count].reshape(rows, -1)


def write_types(file: Path, types: dict):
    """Write a one-layer Gemma 3 as GGUF with matrices of these types; return the expected parts of our
    layers.
    """
    w = gguf.GGUFWriter(file, "gemma3")
    w.add_block_count(1), w.add_context_length(256), w.add_embedding_length(256)
    w.add_feed_forward_length(512), w.add_head_count(4), w.add_head_count_kv(4), w.add_key_length(64)
    w.add_value_length(64), w.add_layer_norm_rms_eps(1e-6), w.add_rope_freq_base(1e6)
    w.add_sliding_window(64), w.add_eos_token_id(1)
    norms = "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"
    for norm in ("output_norm", *(f"blk.0.{name}" for name in norms)):
        w.add_tensor(f"{norm}.weight", np.ones(64 if norm[-6:] in ("q_norm", "k_norm") else 256, np.float32))
    exact = {}
    for name, type_ in types.items():
        kind = gguf.GGMLQuantizationType[type_]
        rows, columns = 512 if name in ("ffn_gate", "ffn_up") else 256, 512 if name == "ffn_down" else 256
        blocks = random_blocks(kind, rows, columns)
        w.add_tensor(f"{'' if name == 'token_embd' else 'blk.0.'}{name}.weight", blocks, raw_dtype=kind)
        exact[name] = type_, torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return file, {ours: [exact[name] for name in names] for ours, names in OURS.items()}


def write_published(folder: Path, name: str, **more):
    """Write a target whose projections have a quantized format; return the expected parts of our layers."""
    said, make = FORMATS[name]
    state, exact, g = target_state(SMALL), {}, torch.Generator().manual_seed(2)
    for tensor in [n for n in state if n.endswith("_proj.weight")]:
        parts, weight = make(tuple(state.pop(tensor).shape), g)
        exact[tensor] = name, weight.float()
        state |= {tensor.replace("weight", part, 1): x for part, x in parts.items()}
    state["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    theirs = {"wqkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "wo": ("self_attn.o",),
              "mlp.w_gate_up": ("mlp.gate", "mlp.up"), "mlp.w_down": ("mlp.down",)}
    return write_source(folder, state, SMALL | {"quantization_config": said | more}), {
        f"layers.{i}.{ours}": [exact[f"model.layers.{i}.{one}_proj.weight"] for one in names]
        for i in range(LAYERS) for ours, names in theirs.items()}


@pytest.mark.parametrize("name", [*FORMATS, *GGUF, "GGUF of four types"])
def test_published_formats(tmp_path, capsys, name):
    """Weights kept in their format equal the reference in float32, or, after a warning, its rounded values.
    """
    if name in FORMATS:
        source, expected = write_published(tmp_path / "in", name)
    else:  # q, k and v have three types: they get a kind that holds all
        others = {"attn_k": "Q6_K", "attn_v": "Q8_0"}
        types = dict.fromkeys(MIXED, name) | others if name in GGUF else MIXED
        source, expected = write_types(tmp_path / "m.gguf", types)
    state = load_file(convert(source, tmp_path / "out", dtype="bf16", quiet=True) / "model.safetensors")
    model, config = load_model(convert(source, tmp_path / "stored", quiet=True))
    kinds, said = config["quantization"]["kinds"], capsys.readouterr().err
    assert kinds.keys() == expected.keys() and (name != "GGUF of four types" or kinds == KINDS)
    assert ("rounding to int8 in groups of 32 inputs" in said) == (name in ROUNDED_TYPES)
    for layer, parts in expected.items():
        exact, stored = torch.cat([x for _, x in parts]), model.get_submodule(layer).dequantize(torch.float32)
        assert torch.equal(state[f"{layer}.weight"], exact.bfloat16()), layer
        assert torch.equal(stored, torch.cat([
            ROUNDED.dequantize(*round_groups(x)) if type_ in ROUNDED_TYPES else x
            for type_, x in parts])), layer


@pytest.mark.parametrize("file, name, method, nested", [
    ("quantize_config.json", "GPTQ, version 2", "bits", lambda x: x),
    ("quant_config.json", "AWQ", "version", lambda x: x),
    ("hf_quant_config.json", "ModelOpt, NVFP4", "quant_algo", lambda x: {"quantization": x}),
])
def test_quantization_in_a_file_of_its_own(tmp_path, file, name, method, nested):
    """It is read as that of config.json, and named if it is not supported."""
    source, _ = write_published(tmp_path / "in", name)
    expected = load_file(convert(source, tmp_path / "out", quiet=True) / "model.safetensors")
    said = (config := json.loads((source / "config.json").read_text())).pop("quantization_config")
    del said["quant_method"]
    (source / "config.json").write_text(json.dumps(config))
    (source / file).write_text(json.dumps(nested(said)))
    found = load_file(convert(source, tmp_path / "out2", quiet=True) / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(x, expected[n]) for n, x in found.items())
    (source / file).write_text(json.dumps(nested(said | {method: "W4A8_AWQ"})))
    with pytest.raises(InputError, match=f'in: {file}: {method} "W4A8_AWQ" is not supported; expected'):
        convert(source, tmp_path / "out3", quiet=True)


@pytest.mark.parametrize("tiled", (False, True))
def test_quantized_weights_are_not_rounded_again(tiled):
    """Quantized rows and columns are reordered without rounding them again."""
    kind, draw = Kind("q8", 16), draws(1)
    fields = {"head_dim": 8, "num_heads": 4, "num_kv_heads": 2, "rotary_dim": 4, "delta_heads": 4,
              "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 16}
    rows = {"self_attn.q_proj": 64, "self_attn.k_proj": 16, "linear_attn.out_proj": 64}
    rows |= ({"linear_attn.in_proj_qkv": 96, "linear_attn.in_proj_z": 64, "linear_attn.in_proj_a": 4} if tiled
             else {"linear_attn.in_proj_qkvz": 160, "linear_attn.in_proj_ba": 8})

    def entry(count: int) -> Entry:
        q, scale = draw(count, 64).mul(40).to(torch.int8), draw(count, 4)
        grouped = Grouped(kind, lambda to: (pack_values(to, q), *regroup(kind, to, scale, None)))
        return Entry((count, 64), torch.bfloat16, lambda: numbers(kind, q, scale, None), "Q8", grouped)

    found = rearranged(Path("file"), fields, {f"{name}.weight": entry(n) for name, n in rows.items()}, tiled)
    assert len(found) > len(rows)
    for name, one in found.items():
        stored, order = numbers(kind, *one.grouped.read(one.grouped.kind)), one.grouped.order
        assert one.grouped.kind.ordered == (order is not None) == (tiled and "out_proj" in name)
        same(stored if order is None else stored[:, order.argsort()], one.read())


def part(name: str, change):
    """Return a change of one part of a layer."""
    return lambda state: state.update({n: change(state[n]) for n in [*state] if n.endswith(f"o_proj.{name}")})


def drop(name: str):
    return lambda state: [state.pop(n) for n in [*state] if n.endswith(f"o_proj.{name}")]


@pytest.mark.parametrize("name, change, words", [
    ("GPTQ", {"bits": 3}, "quantization_config: bits 3 is not supported; expected 2 or 4 or 8"),
    ("GPTQ", {"bits": 8}, "model.layers.0.mlp.down_proj: not a layer of gptq (has 4 bits, its config says 8"),
    ("AWQ", {"version": "gemv"}, 'quantization_config: version "gemv" is not supported; expected "gemm"'),
    ("AWQ", {"quant_method": "bitsandbytes"}, 'quantization_config {"quant_method": "bitsandbytes", '),
    ("NVFP4", {"format": "mxfp6-pack-quantized"}, 'quantization_config: format "mxfp6-pack-quantized" is'),
    ("GPTQ", drop("scales"), "not a layer of gptq"),
    ("GPTQ", part("scales", lambda x: x[:1]), "qzeros is torch.int32 [4, 4], expected torch.int32 [1, 4]"),
    ("GPTQ", part("scales", lambda x: x * torch.nan), "NaN or infinite values"),
    ("GPTQ", part("qweight", torch.Tensor.float), "qweight is torch.float32"),
    ("GPTQ", part("g_idx", lambda x: x * 0), "its 64 inputs are not in 4 groups of equal size"),
    ("GPTQ", part("g_idx", lambda x: x - 1), "not a layer of gptq"),
    ("GPTQ", drop("qzeros"), "not a layer of gptq"),
    ("GPTQ", part("g_idx", lambda x: x.roll(1) % 3), "its 64 inputs are not in 4 groups of equal size"),
    ("GPTQ", part("g_idx", lambda x: x + 9), "not a layer of gptq"),
    ("GPTQ, desc_act", drop("g_idx"), "lacks g_idx, for which its config asks"),
    ("GPTQ, desc_act", part("g_idx", lambda x: x * 0 - 1), "lacks g_idx, for which its config asks"),
    ("GPTQ", part("qweight", torch.Tensor.long), "qweight is torch.int64"),
    ("compressed-tensors, int4", part("weight_packed", torch.Tensor.long), "weight_packed is torch.int64"),
    ("compressed-tensors, int4 with zero points", part("weight_zero_point", torch.Tensor.long),
     "weight_zero_point is torch.int64"),
    ("compressed-tensors, int4", drop("weight_scale"), "('weight_scale')"),
    ("compressed-tensors, int8", {"config_groups": {"g": {"weights": {"num_bits": 7}}}},
     "has 8 bits, its config says 7"),
    ("NVFP4", part("weight_global_scale", lambda x: x / 0), "the scale of the whole weight is not finite"),
    ("GPTQ", {"group_size": 32}, "has groups of 16 inputs, its config says 32"),
    ("AWQ", {"group_size": 128}, "has groups of 16 inputs, its config says 128"),
    ("AWQ", {"q_group_size": -1}, "has groups of 16 inputs, its config says 64"),
    ("GPTQ", {"dynamic": {"+:.*": {"bits": 8}}, "group_size": 64}, "groups of 16 inputs, its config says 64"),
    ("compressed-tensors, int4", {"config_groups": {"g": {"weights": {"strategy": "channel"}}}},
     "has groups of 16 inputs, its config says 64"),
    ("compressed-tensors, W8A8", {"config_groups": {"g": {"weights": {"num_bits": 4}}}},
     "has values of 8 bits, its config says 4"),
    ("compressed-tensors, FP8", {"config_groups": {"g": {"weights": {"type": "int"}}}},
     "has float values, its config says int"),
    ("compressed-tensors, int4 with zero points",
     {"config_groups": {"g": {"weights": {"symmetric": True}}}}, "symmetric is true, but it has zero points"),
    ("compressed-tensors, int4", {"config_groups": {"g": {"weights": {"group_size": 64}}}},
     "has groups of 16 inputs, its config says 64"),
    ("compressed-tensors, int4", {"config_groups": {"g": {"weights": {"symmetric": False}}}},
     "lacks zero points, for which its config asks"),
    ("compressed-tensors, int4", {"config_groups": {"g": {"weights": {"actorder": "group"}}}},
     "lacks g_idx, for which its config asks"),
    ("GPTQ, symmetric", {"checkpoint_format": "gptq_v2"}, "sym is true, but its zeros are not 8"),
    ("GPTQ", part("scales", lambda x: x[:, :-1]), "scales is torch.float16"),
    ("AWQ", part("qzeros", lambda x: x[:, :2]), "qzeros is torch.int32 [4, 2], expected torch.int32 [4, 4]"),
    ("compressed-tensors, int4", part("weight_shape", lambda x: x.flip(0) * 2), "weight_packed"),
    ("compressed-tensors, int4", part("weight_scale", lambda x: x[:1]), "weight_scale is torch.bfloat16"),
    ("compressed-tensors, W8A8", part("weight_scale", lambda x: x[:5]), "weight_scale is torch.float32"),
    ("compressed-tensors, FP8", drop("weight_scale"), "is not stored as floating point"),
    ("NVFP4", part("weight_global_scale", lambda x: x * 0), "NaN or infinite"),
    ("MXFP4", part("weight_scale", lambda x: x * 0 + 255), "NaN or infinite"),
    ("MXFP4", part("weight_packed", lambda x: x[:, :-1]), "weight_scale is torch.uint8"),
    ("fp8 in blocks", part("weight_scale_inv", lambda x: torch.cat((x, x))), "weight_scale_inv is"),
    ("fp8 in blocks", part("weight_scale_inv", lambda x: x / 0), "NaN or infinite"),
    ("fp8 in blocks", part("weight", lambda x: (x.float() * torch.nan).to(x.dtype)), "not finite"),
])
def test_invalid_and_unsupported_formats(tmp_path, name, change, words):
    """Config options, and parts of a layer."""
    source, _ = write_published(tmp_path / "in", name, **change if isinstance(change, dict) else {})
    if callable(change):
        change(state := load_file(file := source / "model.safetensors"))
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    for dtype in ("keep", "bf16"):
        with pytest.raises(InputError, match=f"{re.escape(str(source))}.*{re.escape(words)}"):
            convert(source, tmp_path / "out", dtype=dtype, quiet=True)
    assert not (tmp_path / "out").exists()
