"""quantize.py: what is written, what it is worth, and that speculation on it is plain decoding on it."""
import re
from pathlib import Path

import pytest
import torch
from helpers import edit
from helpers.families import WIDE, converted
from helpers.kernels import draws, same
from helpers.sources import CONFIG, target_state, write_source
from safetensors.torch import load_file, save_file

import quantize
from checkpoint import writer
from checkpoint.convert import convert
from checkpoint.hybrid import rearranged
from checkpoint.load import load_head, load_model
from checkpoint.quantizing import QuantizationPlan, quantize_folder
from checkpoint.source import Entry, Grouped
from common.errors import InputError
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from families.mixed import causal
from kernels.choose import choose_backend
from kernels.quantized import LM_HEAD_MODES, Scheme, e2m1, quantize_linears
from kernels.stored import Kind, numbers, pack_pairs, pack_values, regroup
from tree import TreeShape

PROMPT = [256, *b"Once upon a time there was"]
GROUPED = ("--group", "32")
INT4 = ("--mode", "int4", *GROUPED)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text that is long enough to calibrate on."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("\n".join(f"Item {i}: the square of {i} is {i * i}." for i in range(120)))
    return path


def run(capsys, *args):
    code = quantize.main([str(a) for a in args])
    return code, capsys.readouterr()


def nearest(mode: str) -> tuple:
    """The options of a mode that needs no text."""
    return ("--mode", mode, *((*GROUPED, "--method", "nearest") if mode in LM_HEAD_MODES else ()))


@pytest.mark.kernels
@pytest.mark.parametrize("mode, most, dtype, temperature", (
    ("int8", 0.01, "fp32", 1.0), ("w8a8", 0.01, "bf16", 0.0), ("int4", 0.3, "bf16", 1.0),
    ("w4a8", 0.3, "fp32", 0.0), ("fp8", 0.05, "bf16", 0.0),
))
def test_a_target_and_its_heads(golden, tmp_path, capsys, text, mode, most, dtype, temperature):
    """In int4 and w4a8 the layers are calibrated; lm_head and draft head are int8 and w8a8. Drafted text is
    plain text.
    """
    out, scored, four_bits = tmp_path / "q", tmp_path / "text.txt", mode in LM_HEAD_MODES
    scored.write_text("The cat sat on the mat, and the dog sat on the cat. " * 10)
    options = "--mode", mode, "--text", scored, *((*GROUPED, "--calibrate", text) if four_bits else ())
    code, printed = run(capsys, "--checkpoint", golden, "--out", out, *options)
    agreement = float(re.search(r"perplexity .* same next token ([\d.]+)%", printed.out)[1])
    assert code == 0 and agreement > (50 if four_bits else 90)
    before, after = load_file(golden / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in ("embed.weight", "norm.weight"))
    model, config = load_model(out, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    beside = {"int4": "int8", "w4a8": "w8a8"}.get(mode, mode)
    layer, found = model.layers[2].wqkv, config["quantization"]
    kinds = found.pop("kinds", {})
    written = {"mode": "stored" if four_bits else mode, "group": 0, "lm_head": beside}
    assert found == written and (out / "tokenizer.json").is_file()
    assert not four_bits or kinds["layers.2.wqkv"] == "q4-32-row-min"
    weight = before["layers.2.wqkv.weight"]
    assert 0 < (layer.dequantize(torch.float32) - weight).norm() / weight.norm() < most
    head = load_head(out / "eagle3", model, "eagle3")
    assert head.fc.mode == head.lm_head.mode == beside
    choose_backend("cpu").prepare(model, head)
    plain, fast = (
        Engine(model, drafter, compile=False, max_seq_len=150).generate(
            [PROMPT], Sampling(80, temperature, seed=3))[0].ids
        for drafter in (None, HeadDrafter(head, TreeShape(12, 3, 4))))
    assert fast == plain


def test_four_bits_of_an_older_version(golden, tmp_path, capsys):
    """They have one bfloat16 scale per group, and no minima."""
    assert run(capsys, "--checkpoint", golden, "--out", tmp_path / "q")[0] == 0
    path = tmp_path / "q" / "model.safetensors"
    state, name = load_file(path), "layers.1.wo"
    q, scale = state[f"{name}.weight"] >> 4, state[f"{name}.scale"].bfloat16()
    for layer in {key.removesuffix(".scale") for key in state if key.endswith(".scale")} - {"lm_head"}:
        whole = state[f"{layer}.weight"]
        state[f"{layer}.weight"] = pack_pairs((whole >> 4) + 8)
        state[f"{layer}.scale"] = state[f"{layer}.scale"].bfloat16().repeat(1, whole.shape[1] // 32)
    save_file(state, path)
    edit(tmp_path / "q", quantization={"mode": "int4", "group": 32, "lm_head": "int8"})
    model = load_model(tmp_path / "q")[0]
    assert torch.equal(model.get_submodule(name).dequantize(torch.float32), q * scale.float())


@pytest.mark.parametrize("order", (1, -1))
def test_weights_and_scales_are_written_in_any_order(golden, tmp_path, monkeypatch, order):
    for name in ("usual", "other"):
        plan = QuantizationPlan.from_folder(golden / "eagle3", Scheme("int8", 0, "int8"))
        quantize_folder(plan, tmp_path / name)
        monkeypatch.setattr(writer, "sorted", lambda plan, key: plan[::order], raising=False)
    usual, other = (load_file(tmp_path / name / "model.safetensors") for name in ("usual", "other"))
    assert usual.keys() == other.keys() and all(torch.equal(usual[name], other[name]) for name in usual)


def test_a_tied_lm_head_becomes_its_own(tmp_path, capsys):
    """In another mode than the layers."""
    config = {**CONFIG, "tie_word_embeddings": True}
    target = convert(write_source(tmp_path / "in", target_state(config), config), tmp_path / "t", quiet=True)
    for options, mode in ((("--lm-head", "int4"), "int4"), (("--keep-lm-head",), None), ((), "int8")):
        out = tmp_path / str(mode)
        assert run(capsys, "--checkpoint", target, "--out", out, *nearest("int4"), *options)[0] == 0
        model, config = load_model(out)
        found = {"int4": "q4"}.get(mode, mode)
        assert getattr(model.lm_head, "mode", None) == found and model.layers[0].wo.mode == "q4"
        assert ("lm_head" in config["quantization"]["kinds"]) == (found == "q4")


@pytest.mark.kernels
@torch.no_grad()
def test_a_calibrated_target_computes_more_exactly(golden, tmp_path, capsys, text):
    """Calibrated on a text that is given, and on one that it writes itself."""
    ids = torch.tensor([list(text.read_bytes()[:256])])
    exact, _ = load_model(golden)
    want, off = exact.logits(causal(exact, ids)[0]), []
    for i, method in enumerate((("--method", "nearest"), ("--calibrate", text), ())):
        out = tmp_path / str(i)
        code, printed = run(capsys, "--checkpoint", golden, "--out", out, *INT4, *method)
        found = "of outputs" in printed.out, "text to calibrate on" in printed.err
        assert code == 0 and found == (i > 0, i > 1)
        model, _ = load_model(out)
        off.append((model.logits(causal(model, ids)[0]) - want).norm() / want.norm())
    assert max(off[1:]) < 0.8 * off[0]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_quantized_as_it_is_loaded(golden, tmp_path, kind):
    """Is what the command makes of it; what it has from its target stays the target's. Weights of another
    type than the config says are refused: kernels would take them for it.
    """
    assert quantize.main(["--checkpoint", str(golden / kind), "--out", str(tmp_path / "q")]) == 0
    target, _ = load_model(golden)
    head, stored = load_head(golden / kind, target), load_head(tmp_path / "q", target)
    before = {name: p.clone() for name, p in target.state_dict().items()}
    quantize_linears(head, Scheme("int8", 0, "int8" if head.args.own_lm_head else None))
    state, expected = head.state_dict(), stored.state_dict()
    assert state.keys() == expected.keys() and any(t.dtype == torch.int8 for t in state.values())
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert (head.lm_head is target.lm_head) == (kind == "eagle")
    assert all(torch.equal(p, before[name]) for name, p in target.state_dict().items())
    edit(tmp_path / "q", quantization={"mode": "fp8", "group": 0, "lm_head": {"eagle3": "fp8"}.get(kind)})
    with pytest.raises(InputError, match=r"config\.json says torch\.float8_e4m3fn"):
        load_head(tmp_path / "q", target)


@pytest.mark.parametrize("name", ("LFM2-MoE", "Gemma 4 E2B", "Gemma 4 26B-A4B", "Qwen3.5"))
def test_families_are_calibrated(tmp_path, name):
    """Their layers differ in caches, and in what they read beside the stream."""
    sizes = WIDE | {"intermediate_size": 96, "hidden_size_per_layer_input": 32 * ("E2B" in name)}
    _, source = converted(tmp_path, name, **sizes, global_head_dim=64)
    ids = torch.arange(256).view(2, 128) % 50
    plan = QuantizationPlan.from_folder(source, Scheme("int4", 32, "int8"))
    errors = quantize_folder(plan, tmp_path / "q", ids)
    linear = [error for what, error in errors.values() if what == "of outputs"]
    assert len(linear) >= 20 and max(linear) < 0.3


@pytest.mark.parametrize("scheme", (Scheme("w8a8", 0, "w8a8"), Scheme("int4", 32, "int8")))
def test_experts_in_mxfp4_stay_as_they_are(tmp_path, scheme):
    _, source = converted(tmp_path, "gpt-oss in MXFP4", "bf16")
    ids = torch.arange(256).view(2, 128) % 50
    four_bits = scheme.mode == "int4"
    quantize_folder(QuantizationPlan.from_folder(source, scheme), tmp_path / "q", ids if four_bits else None)
    (exact, _), (target, config) = map(load_model, (source, tmp_path / "q"))
    assert config["quantization"]["experts"] == "mxfp4" and target.lm_head.mode == scheme.lm_head
    for one, other in zip(exact.layers, target.layers):
        assert torch.equal(one.mlp.w_down.weight, other.mlp.w_down.weight)
        assert other.wo.mode == ("q4" if four_bits else scheme.mode)


# -- published quantized checkpoints stand for the weights that their formats define -------------------------


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
    "fp8 in blocks of 32": (
        {"quant_method": "fp8", "weight_block_size": [24, 32]},
        lambda s, g: fp8(s, g, (-(-s[0] // 24), s[1] // 32), "weight_scale_inv", (24, 32))),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 20]},
        lambda s, g: fp8(s, g, (-(-s[0] // 24), -(-s[1] // 20)), "weight_scale_inv", (24, 20))),
}

ROUNDED = {"fp8 in blocks"}  # to int8: no kind has its groups


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


@pytest.mark.parametrize("tiled", (False, True))
def test_matrices_of_a_quantized_source_stay_as_stored(tiled):
    """Rows and inputs are reordered, not rounded again."""
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
    """A change of one part of a layer."""
    return lambda state: state.update({n: change(state[n]) for n in [*state] if n.endswith(f"o_proj.{name}")})


def drop(name: str):
    return lambda state: [state.pop(n) for n in [*state] if n.endswith(f"o_proj.{name}")]


@pytest.mark.parametrize("name, change, words", [
    ("GPTQ", {"bits": 3}, "quantization_config: bits 3 is not supported; expected 2 or 4 or 8"),
    ("GPTQ", {"bits": 8}, "model.layers.0.mlp.down_proj: not a layer of gptq (qzeros is torch.int32 [4"),
    ("AWQ", {"version": "gemv"}, 'quantization_config: version "gemv" is not supported; expected "gemm"'),
    ("AWQ", {"quant_method": "bitsandbytes"}, 'quantization_config {"quant_method": "bitsandbytes", '),
    ("NVFP4", {"format": "mxfp6-pack-quantized"}, 'quantization_config: format "mxfp6-pack-quantized" is'),
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
    ("fp8 in blocks", part("weight", lambda x: (x.float() * torch.nan).to(x.dtype)), "not finite"),
])
def test_what_does_not_fit_or_is_not_supported(tmp_path, name, change, words):
    """Options of the config, and parts of a layer."""
    source, _ = published(tmp_path / "in", name, **change if isinstance(change, dict) else {})
    if callable(change):
        change(state := load_file(file := source / "model.safetensors"))
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    for dtype in ("keep", "bf16"):
        with pytest.raises(InputError, match=f"{re.escape(str(source))}.*{re.escape(words)}"):
            convert(source, tmp_path / "out", dtype=dtype, quiet=True)
    assert not (tmp_path / "out").exists()
