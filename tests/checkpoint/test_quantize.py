"""quantize.py: the files it writes, their error, and lossless speculation on quantized targets."""
import re

import pytest
import torch
from helpers import edit
from helpers.families import WIDE, converted
from helpers.sources import CONFIG, target_state, write_source
from safetensors.torch import load_file, save_file

import quantize
from checkpoint import writer
from checkpoint.convert import convert
from checkpoint.load import load_head, load_model
from checkpoint.quantizing import QuantizationPlan, quantize_folder
from common.errors import InputError
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from families.mixed import causal
from kernels.choose import choose_backend
from kernels.scheme import LM_HEAD_MODES, Scheme, quantize_linears
from kernels.stored import pack_pairs
from tree import TreeShape

PROMPT = [256, *b"Once upon a time there was"]
GROUPED = ("--group", "32")
INT4 = ("--mode", "int4", *GROUPED)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text long enough for calibration."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("\n".join(f"Item {i}: the square of {i} is {i * i}." for i in range(120)))
    return path


def run(capsys, *args):
    code = quantize.main([str(a) for a in args])
    return code, capsys.readouterr()


def nearest(mode: str) -> tuple:
    """Return the options of a mode without calibration."""
    return ("--mode", mode, *((*GROUPED, "--method", "nearest") if mode in LM_HEAD_MODES else ()))


@pytest.mark.kernels
@pytest.mark.parametrize("mode, max_error, dtype, temperature", (
    ("int8", 0.01, "fp32", 1.0), ("w8a8", 0.01, "bf16", 0.0), ("int4", 0.3, "bf16", 1.0),
    ("w4a8", 0.3, "fp32", 0.0), ("fp8", 0.05, "bf16", 0.0),
))
def test_quantize_target_and_heads(golden, tmp_path, capsys, text, mode, max_error, dtype, temperature):
    """With int4 and w4a8 the layers are calibrated; lm_head and draft head become int8 and w8a8. Speculative
    output equals plain output.
    """
    out, scored, four_bits = tmp_path / "q", tmp_path / "text.txt", mode in LM_HEAD_MODES
    scored.write_text("The cat sat on the mat, and the dog sat on the cat. " * 10)
    options = "--mode", mode, "--text", scored, *((*GROUPED, "--calibrate", text) if four_bits else ())
    code, printed = run(capsys, "--checkpoint", golden, "--out", out, *options)
    agreement = float(re.search(r"perplexity .* top-1 agreement ([\d.]+)%", printed.out)[1])
    assert code == 0 and agreement > (50 if four_bits else 90)
    before, after = load_file(golden / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in ("embed.weight", "norm.weight"))
    model, config = load_model(out, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    beside = {"int4": "int8", "w4a8": "w8a8"}.get(mode, mode)
    layer, scheme = model.layers[2].wqkv, config["quantization"]
    kinds = scheme.pop("kinds", {})
    expected = {"mode": "stored" if four_bits else mode, "group": 0, "lm_head": beside}
    assert scheme == expected and (out / "tokenizer.json").is_file()
    assert not four_bits or kinds["layers.2.wqkv"] == "q4-32-row-min"
    weight = before["layers.2.wqkv.weight"]
    assert 0 < (layer.dequantize(torch.float32) - weight).norm() / weight.norm() < max_error
    head = load_head(out / "eagle3", model, "eagle3")
    assert head.fc.mode == head.lm_head.mode == beside
    choose_backend("cpu").prepare(model, head)
    plain, fast = (
        Engine(model, drafter, compile=False, max_seq_len=150).generate(
            [PROMPT], Sampling(80, temperature, seed=3))[0].ids
        for drafter in (None, HeadDrafter(head, TreeShape(12, 3, 4))))
    assert fast == plain


def test_int4_folders_of_older_versions(golden, tmp_path, capsys):
    """Older folders have one bfloat16 scale per group and no minima."""
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


def test_quantizing_unties_lm_head(tmp_path, capsys):
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
def test_calibration_reduces_the_error(golden, tmp_path, capsys, text):
    """Calibrated on a given text, and on text the target generates itself."""
    ids = torch.tensor([list(text.read_bytes()[:256])])
    original, _ = load_model(golden)
    expected, errors = original.logits(causal(original, ids)[0]), []
    for i, method in enumerate((("--method", "nearest"), ("--calibrate", text), ())):
        out = tmp_path / str(i)
        code, printed = run(capsys, "--checkpoint", golden, "--out", out, *INT4, *method)
        printed = "of outputs" in printed.out, "calibration text" in printed.err
        assert code == 0 and printed == (i > 0, i > 1)
        model, _ = load_model(out)
        errors.append((model.logits(causal(model, ids)[0]) - expected).norm() / expected.norm())
    assert max(errors[1:]) < 0.8 * errors[0]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_quantize_head_at_load(golden, tmp_path, kind):
    """Equals the head written by quantize.py; modules shared with the target are not quantized. Weights whose
    dtype differs from the config are rejected, because kernels trust the config.
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
    """Layers differ in their caches and in their inputs besides the residual stream."""
    _, source = converted(tmp_path, name, **WIDE[name] | {"intermediate_size": 96})
    ids = torch.arange(256).view(2, 128) % 50
    plan = QuantizationPlan.from_folder(source, Scheme("int4", 32, "int8"))
    errors = quantize_folder(plan, tmp_path / "q", ids)
    calibrated = [error for what, error in errors.values() if what == "of outputs"]
    assert len(calibrated) >= 20 and max(calibrated) < 0.3


@pytest.mark.parametrize("scheme", (Scheme("w8a8", 0, "w8a8"), Scheme("int4", 32, "int8")))
def test_mxfp4_experts_are_not_requantized(tmp_path, scheme):
    _, source = converted(tmp_path, "gpt-oss in MXFP4", "bf16")
    ids = torch.arange(256).view(2, 128) % 50
    four_bits = scheme.mode == "int4"
    quantize_folder(QuantizationPlan.from_folder(source, scheme), tmp_path / "q", ids if four_bits else None)
    (original, _), (target, config) = map(load_model, (source, tmp_path / "q"))
    assert config["quantization"]["experts"] == "mxfp4" and target.lm_head.mode == scheme.lm_head
    for one, other in zip(original.layers, target.layers):
        assert torch.equal(one.mlp.w_down.weight, other.mlp.w_down.weight)
        assert other.wo.mode == ("q4" if four_bits else scheme.mode)
