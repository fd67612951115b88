"""Invalid sources and folders: one-line errors, exit status, no files left behind."""
import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from helpers import refused
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, run, target_state, write_gguf, write_source
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from checkpoint.folder import verify_weights
from checkpoint.load import load_head, load_model
from common.errors import InputError


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def folder_with(family="", drop=(), add=None, form="safetensors", then=lambda folder: None, **changes):
    """Return a function that writes the source folder of a target or a head with these differences from a
    valid one.
    """
    def make(folder: Path) -> Path:
        state, config = (head_state(), HEAD_CONFIG) if family == "head" else (target_state(), CONFIG)
        state = {n: t for n, t in state.items() if n not in drop} | (add or {})
        known = {"architectures": [f"{family}ForCausalLM"]} if family not in ("", "head") else {}
        write_source(folder, state, config | known | changes, form)
        then(folder)
        return folder
    return make


def only(state: dict, form="safetensors", config=CONFIG):
    """Return a function that writes a source folder with these tensors only."""
    return lambda folder: write_source(folder, state, config, form)


def gguf_file(keep: float = 1.0, **options):
    def make(folder: Path) -> Path:
        file = write_gguf(folder / "m.gguf", target_state(), **options)
        os.truncate(file, int(file.stat().st_size * keep))
        return file
    return make


def retyped(code: int):
    """Return a function that writes a GGUF file whose first matrix claims another type."""
    def make(folder: Path) -> Path:
        content, name = bytearray((file := gguf_file()(folder)).read_bytes()), b"token_embd.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        content[at : at + 4] = code.to_bytes(4, "little")
        file.write_bytes(content)
        return file
    return make


def copied_part(folder: Path) -> Path:
    """Write a split GGUF whose second part is a copy of the first."""
    file = gguf_file(extra=lambda w: (w.add_uint16("split.count", 2), w.add_uint16("split.no", 0)))(folder)
    first, second = (folder / f"m-{i:05}-of-00002.gguf" for i in (1, 2))
    second.write_bytes(file.read_bytes())
    return file.rename(first)


INDEX = "model.safetensors.index.json"
K0, LFS = "model.layers.0.self_attn.k_proj.weight", "version https://git-lfs.github.com/spec/v1\n"


def remove_from_index(folder: Path, names=(K0,)) -> None:
    """Copy a tensor into the shards that lack it, and remove it from the index."""
    index = folder / INDEX
    shards = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {n: f for n, f in shards.items() if n not in names}}))
    for file in {*shards.values()} - {shards[K0]}:
        save_file(load_file(folder / file) | {K0: torch.zeros(32, 32)}, folder / file)


BAD_TARGETS = {
    "unknown architecture": (folder_with("Mamba"), "MambaForCausalLM"),
    "truncated safetensors": (
        folder_with(then=lambda f: os.truncate(f / "model.safetensors", 50_000)), "truncated"),
    "truncated GGUF data": (gguf_file(0.7), "truncated"),
    "a folder of GGUF files": (lambda f: gguf_file()(f).parent, "files: m.gguf is a model (llama)"),
    "a GGUF matrix of another type": (retyped(1), "begins at byte"),
    "a GGUF matrix of an unsupported type": (retyped(24), "m.gguf: tensor token_embd.weight: type I8 is not"),
    "a part of a split GGUF twice": (copied_part, "do not belong together"),
    "one part of a split GGUF": (gguf_file(extra=lambda w: w.add_uint16("split.count", 2)), "split GGUF"),
    **{f"GGUF {kind}": (gguf_file(extra=lambda w, kind=kind: w.add_type(kind)), words) for kind, words in {
        "adapter": "a LoRA adapter", "imatrix": "an importance matrix", "speech": "'speech'"}.items()},
    "GGUF without weights": (lambda f: write_gguf(f / "m.gguf", {}), "a vocabulary without weights"),
    **{f"a pointer of Git LFS: {file}": (
        folder_with(then=lambda folder, file=file: (folder / file).write_text(LFS)), f"{file}: is a Git LFS")
        for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer.model")},
    "an index without a map": (folder_with(
        form="safetensors-sharded", then=lambda f: (f / INDEX).write_text("{}")),
        "has no weight_map"),
    "shards that disagree, unlisted": (folder_with(form="safetensors-sharded", then=remove_from_index), K0),
    "shards that disagree, no index": (folder_with(
        form="safetensors-sharded", then=lambda f: (remove_from_index(f), (f / INDEX).unlink())), K0),
    "an index that names another file": (folder_with(form="safetensors-sharded", then=lambda f: (
        f / INDEX).write_text((f / INDEX).read_text().replace("1-of", "2-of", 1))), "another file has it"),
    "an index of files elsewhere": (folder_with(form="safetensors-sharded", then=lambda f: (
        f / INDEX).write_text((f / INDEX).read_text().replace("model-", "../model-"))), "has no weight_map"),
    "missing tensor": (folder_with(drop=[K0]), f"{K0} [32, 32] is missing"),
    "wrong shape": (
        folder_with(add={K0: torch.zeros(31, 32)}), f"{K0} has shape [31, 32], expected [32, 32]"),
    "tied, with another lm_head": (folder_with(tie_word_embeddings=True), "tie_word_embeddings"),
    "integer weights": (folder_with(add={K0: torch.zeros(32, 32, dtype=torch.int64)}), K0),
    "a pickle that runs a command": (only({K0: Evil()}, "bin"), "objects other than tensors"),
    "a head without --target": (folder_with("head"), "is a draft head; add --target"),
    "dynamic RoPE": (folder_with(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
    "bidirectional attention": (
        folder_with("Gemma3", use_bidirectional_attention=True), "use_bidirectional_attention"),
    "partial RoPE of Mistral": (folder_with("Mistral", partial_rotary_factor=0.5), "partial_rotary_factor"),
    "an unknown parameter of RoPE": (folder_with(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "odd_scale": 2.0}), "odd_scale 2.0 is not sup"),
    **{f"{family} {key}": (folder_with(family, **{key: value}), f"{key} {json.dumps(value)} is not supported")
       for family in ("Llama", "Qwen2", "Gemma3")
       for key, value in (("clip_qkv", 8.0), ("alibi", True), ("logit_softcap", 30.0))},
    **{f"{key} {value}": (folder_with(**{key: value}), f"{key} is {value!r}; expected a valid ")
       for key, value in (("rope_scaling", 64), ("layer_types", 3), ("use_sliding_window", "false"))},
    "an MTP layer of a family without": (
        folder_with(add={"mtp.fc.weight": torch.zeros(32, 64)}, rope_scaling=None, use_sliding_window=True),
        "mtp.fc.weight"),
    "no heads": (folder_with(num_attention_heads=0), "num_attention_heads is 0; expected greater than or"),
    "layers that are not integers": (
        folder_with(no_rope_layers=["a"]), "no_rope_layers.0 is 'a'; expected a valid integer"),
    "values of another size than keys": (
        folder_with("Glm4MoeLite", q_lora_rank=8, v_head_dim=16), "v_head_dim 16 is not supported"),
    "a PARD-2 projection of another size": (folder_with(
        add={"target_proj.weight": torch.zeros(32, 60)}, pard2_target_layers=[-1, -2], pard2_target_dim=64),
        "[32, 60] does not fit pard2_target_layers [-1, -2]"),
    "Nemotron-H": (folder_with("NemotronH"), "its MLPs and experts have no gate"),
    "Granite 4 H as GGUF": (gguf_file(arch="granitehybrid"), "Granite 4 H is read from its Hugging Face fol"),
    "Granite 4 H with experts as GGUF": (gguf_file(
        arch="granitehybrid", extra=lambda w: w.add_expert_count(64)), "Granite with experts is not supp"),
    "Granite 3 with experts": (folder_with("GraniteMoe"), "Granite with experts is not supported"),
    "Granite 4 with experts": (
        folder_with("GraniteMoeHybrid", num_local_experts=64), "num_local_experts 64 is not supported"),
    "Nemotron-H as GGUF": (gguf_file(arch="nemotron_h"), "its MLPs and experts have no gate"),
    **{f"GLM-4-9B of 2024, {form}": (make, "GLM-4-9B of 2024 is read in transformers' layout only: zai")
       for form, make in (("GGUF", gguf_file(arch="chatglm")), ("folder", folder_with("ChatGLM")))},
    "an unknown key of a GGUF": (gguf_file(extra=lambda w: w.add_clamp_kqv(8.0)), "clamp_kqv 8.0 is"),
    "bidirectional attention in a GGUF": (
        gguf_file(extra=lambda w: w.add_causal_attention(False)), "is_causal false is not supported"),
    "another limit of SwiGLU": (folder_with("GptOss", swiglu_limit=5.0), "swiglu_limit 5.0 is not"),
    "experts in an unsupported format": (
        folder_with("GptOss", quantization_config={"quant_method": "hqq"}), "hqq"),
    "an unknown layer type": (
        folder_with("Qwen3_5", layer_types=["full_attention"] * 7 + ["chunked"]), "each of 8 layers"),
    "value heads not divisible by key heads": (
        folder_with("Qwen3_5", linear_num_key_heads=4, linear_num_value_heads=6),
        "6 value heads are not a multiple of 4"),
    "too many layers": (folder_with(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
}
NORM, AUX = "midlayer.hidden_norm.weight", "eagle_aux_hidden_state_layer_ids"
D2T, T2D = head_state()["d2t"], head_state()["t2d"]
BAD_HEADS = {
    **{f"a head with {key}": (folder_with("head", **{key: value}), words) for key, value, words in (
        ("odd_scale", 2.0, "odd_scale 2.0 is not supported"), ("rope_is_neox_style", False, "style false is"),
        ("eagle_config", {"use_mtp_layernorm": True}, "use_mtp_layernorm true is not supported"),
        ("rope_scaling", {"rope_type": "default", "odd": 3}, "odd 3 is not supported"))},
    "windows in Gemma 4's layers": (folder_with(
        "head", architectures=["Gemma4Eagle3Model"], sliding_window=8, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"]), "layers with a sliding window are not"),
    "hidden size": (only(head_state(hidden=48), config={**HEAD_CONFIG, "hidden_size": 48}), "hidden size 48"),
    "aux layers beyond the target": (
        folder_with("head", eagle_config={AUX: [2, 4, 9]}), "reads layer 9"),
    "DeepSpec's last layer, normed where it was trained": (
        folder_with("head", target_layer_ids=[1, 3, 7]), "target_layer_ids [1, 3, 7]"),
    "no d2t": (folder_with("head", ["d2t", "t2d"]), "d2t"),
    "d2t beyond the vocabulary": (folder_with("head", ["t2d"], {"d2t": D2T + 90}), "d2t"),
    "t2d contradicts d2t": (folder_with("head", add={"t2d": ~T2D}), "t2d"),
    "an MLP speculator": (
        only({"emb.0.weight": torch.zeros(96, 32)}, config={"model_type": "mlp_speculator"}), "MLP spec"),
    "another kind of speculators": (folder_with("head", speculators_model_type="mtp"), "type 'mtp' is not"),
    "HASS in speculators": (folder_with(
        "head", speculators_model_type="eagle", layernorms=True), "(HASS) are not supported"),
    "missing norm": (folder_with("head", [NORM]), NORM),
    "a target that is not converted": (folder_with("head"), "not converted yet", "target-source"),
    "no target": (folder_with("head"), "not a folder", "nowhere"),
    "a token_map beyond the vocabulary": (
        only({"blocks.0.layers.0.weight": torch.zeros(32, 32), "token_map": torch.tensor([3, 96])},
             config={}), "token_map"),
}


@pytest.mark.parametrize("case", [*BAD_TARGETS, *BAD_HEADS])
def test_bad_source(tmp_path, request, capsys, monkeypatch, case):
    make, words, *target = (BAD_TARGETS | BAD_HEADS)[case]
    options = ("--out", "deep/out")
    if case in BAD_HEADS:
        request.getfixturevalue("target")
        options = ("--target", *(target or ["target"]))
    source = make(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code, err = run(capsys, "--checkpoint", source, *options)
    assert code == 1 and len(err) == 1 and err[0].startswith("error: ") and words in err[0], err
    assert sorted(tmp_path.rglob("*")) == before


def test_nan_and_infinite_weights_are_rejected(tmp_path, capsys):
    """Three in the middle of a fused tensor."""
    state, odd = target_state(), torch.tensor([math.nan, math.inf, -math.inf])
    state["model.layers.1.self_attn.k_proj.weight"].view(-1)[5:8] = odd
    source = write_source(tmp_path / "in", state)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    words = f"{source}: tensor model.layers.1.self_attn.k_proj.weight has 3 NaN or infinite values"
    assert code == 1 and len(err) == 1 and err[0].startswith(f"error: {words}")


@pytest.mark.parametrize("which", ["model.safetensors", "eagle3/model.safetensors"])
def test_damaged_weights_are_rejected(tmp_path, target, which):
    """A changed byte, a truncated file, a missing file."""
    head, logged = write_source(tmp_path / "head", head_state(), HEAD_CONFIG), []
    convert(head, target=target, quiet=True)
    verify_weights(target, None, True, logged.append)
    assert len(logged) == 1 and logged[0].startswith("verified ")
    file = target / which
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with refused(f"{file}: its sha256 is {hashlib.sha256(content).hexdigest()}; expected "):
        verify_weights(target, None, False, logged.append)
    model, _ = load_model(target) if "eagle3" in which else (None, None)
    for damage, words in (lambda: os.truncate(file, 1000), "damaged"), (file.unlink, "no such file"):
        damage()
        with pytest.raises(InputError, match=words):
            load_head(target / "eagle3", model) if model else load_model(target)
