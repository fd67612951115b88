"""Every layout of EAGLE heads: random published heads, converted, against a reference written from the
papers. The reference works on the published tensors.
"""
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers.drafters import model_of
from helpers.families import LAYERS, H, V, converted
from helpers.heads import BASE, GEMMA4_LAYER, gemma4_layer, make_head, plain_layer, rms, write_head
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.export import export, main
from checkpoint.load import load_head, load_model, read_config
from common.errors import InputError
from convert_checkpoint import main as convert_main
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from head import Head
from networks.weights import copy_head, own_state
from tree import TreeShape


def reference_eagle1(state, embed, lm_head, tokens, feature, hd):
    """Return (recurrent feature, logits): arXiv 2401.15077."""
    x = F.linear(torch.cat((embed[tokens], feature), -1), state["fc.weight"], state.get("fc.bias"))
    x = plain_layer(lambda n: state.get(f"layers.0.{n}"), x, x, hd)
    return x, x @ lm_head.T


def reference_eagle3(state, embed, lm_head, tokens, feature, hd, first, layers=1, before=False, normed=False):
    """Return (recurrent feature, logits): arXiv 2503.01840 and its variants; `feature` is the output of fc.
    """
    is_gemma = first + "layer_scalar" in state
    embed = embed * embed.shape[1] ** 0.5 if is_gemma else embed
    u = rms(feature, state[first + "hidden_norm.weight"])
    a = torch.cat((rms(embed[tokens], state[first + "input_layernorm.weight"]), u), -1)
    if is_gemma:
        x = gemma4_layer(lambda n: state.get(first + n), feature, a)
        return x, 20 * torch.tanh(rms(x, state["norm.weight"]) @ lm_head.T / 20)
    x = plain_layer(lambda n: state.get(first + n), u if before else feature, a, hd)
    for k in range(1, layers):
        norm = state.get(f"layers.{k}.hidden_norm.weight", state[f"layers.{k}.input_layernorm.weight"])
        x = plain_layer(lambda n, k=k: state.get(f"layers.{k}.{n}"), x, rms(x, norm), hd)
    out = rms(x, state["norm.weight"])
    return out if normed else x, out @ lm_head.T


def run_head(head, tokens, feature):
    """Return (recurrent feature, logits) of one of our heads."""
    T = len(tokens)
    caches = head.caches(1, 64, torch.float32, "cpu")
    at = torch.arange(T)[None]
    with torch.no_grad():
        x = head(tokens[None], feature[None], at, at, torch.arange(64) <= at[..., None], caches)
        return x[0], head.logits(x)[0]


def close(results, expected, tolerance=1e-5):
    return all((x - y).abs().max() < tolerance * y.abs().max() for x, y in zip(results, expected))


def convert_head(tmp_path, target: Path, state: dict, config: dict, name: str = "head") -> Path:
    """Write a head in its published layout and convert it for the target folder."""
    return convert(write_head(tmp_path / f"{name} in", state, config), tmp_path / name, target, quiet=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return (folder, target) of a small LLaMA, and of one with tied embeddings."""
    root, targets = tmp_path_factory.mktemp("base"), {}
    for name in ("Llama-3", "Llama-3.2"):
        _, folder = converted(root / name, name)
        targets[name] = folder, load_model(folder)[0]
    return targets


EAGLE1_HEADS = {
    "bias in the file and not in the config": ({"bias": True}, "Llama-3"),
    "no bias in the file, no bias key": ({}, "Llama-3"),
    "qkv bias (Qwen2)": ({"qkv_bias": True}, "Llama-3"),
    "own KV heads": ({"kv": 4}, "Llama-3"),
    "own embedding": ({"embedding": True}, "Llama-3"),
    "tied target": ({}, "Llama-3.2"),
    "vLLM's copy": ({}, "Llama-3"),
    "speculators": ({"bias": True}, "Llama-3"),
    "speculators, names of SafeAILab": ({}, "Llama-3"),
}


@pytest.mark.parametrize("name", EAGLE1_HEADS)
def test_eagle1_head(tmp_path, base, name):
    options, which = EAGLE1_HEADS[name]
    folder, target = base[which]
    state, config = make_head("eagle", **options)
    files = state, config
    if name == "vLLM's copy":  # nested config, prefix `model.`, and copies of the target's matrices
        copied = {f"model.{n}": t for n, t in state.items()} | {
            "model.embed_tokens.weight": target.embed.weight, "lm_head.weight": target.lm_head.weight}
        files = copied, {"model_type": "eagle", "model": config}
    if "speculators" in name:
        names = {} if "names" in name else {"fc.": "fusion_fc.", "layers.0.": "transformer."}
        theirs = state
        for ours, other in names.items():
            theirs = {n.replace(ours, other): t for n, t in theirs.items()}
        files = theirs, {
            "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "layernorms": False,
            "transformer_layer_config": config}
    head = load_head(convert_head(tmp_path, folder, *files), target, "eagle")
    tokens, features = torch.randint(0, V, (20,)), torch.randn(20, H)
    embed = state.get("embed_tokens.weight", target.embed.weight)
    lm_head = (target.lm_head or target.embed).weight
    expected = reference_eagle1(state, embed, lm_head, tokens, features, 12)
    assert close(run_head(head, tokens, features), expected)
    # Its features are normed target states.
    assert close([head.fuse(features)], [rms(features, target.norm.weight)])
    assert head.args.aux_layers == (LAYERS,) and head.args.own_embedding == ("embedding" in options)
    assert not head.args.own_lm_head


AUX = "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {"speculators_model_type": "eagle3", "norm_before_residual": False}
EAGLE3_HEADS = {  # options of `make_head`, extra tensors, options of `reference_eagle3`
    "SafeAILab": ({}, (), {}),
    "SafeAILab, the whole vocabulary": ({"draft": V}, (), {}),
    "SpecForge, own head size and KV heads": (
        {"hd": 8, "kv": 1, "head_dim": 8, "first": "layers.0."}, (), {}),
    "a head_dim that the config gets wrong": ({"hd": 8, "head_dim": 12}, (), {}),
    "own embedding, fc bias": ({"embedding": True, "bias": True}, (), {}),
    "another width": ({"hidden": 32, "embedding": True, "target_hidden_size": H}, (), {}),
    "two features": ({"aux": 2, "eagle_config": {AUX: [1, 5]}}, (), {}),
    "five features": ({"aux": 5, "eagle_config": {AUX: [1, 2, 3, 4, 5]}}, (), {}),
    "five features, the whole vocabulary (DeepSpec)": (
        {"aux": 5, "draft": V, "target_layer_ids": [1, 2, 3, 4, 5], "num_target_layers": LAYERS}, (), {}),
    "Gemma 4's layer (DeepSpec)": (
        {"aux": 5, "draft": V, "target_layer_ids": [1, 2, 3, 4, 5], "num_target_layers": LAYERS, "kv": 1,
         "qk_norm": True, "first": "layers.0.", **GEMMA4_LAYER, "architectures": ["Gemma4Eagle3Model"],
         "layer_types": ["full_attention"], "ttt_length": 7, "step_loss_decay": 0.8}, (), {}),
    "fc_norm (speculators)": (
        {**SPECULATORS, "first": "layers.0.", "fc_norm": True},
        ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"), {}),
    "aux_norm (SGLang)": (
        {"first": "layers.0."}, ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), {}),
    "norm_before_fc": (
        {**SPECULATORS, "first": "layers.0.", "norm_before_fc": True}, ("input_norm.weight",), {}),
    "norm_before_residual": (
        {**SPECULATORS, "first": "layers.0.", "norm_before_residual": True}, (), {"before": True}),
    "norm_output": ({**SPECULATORS, "first": "layers.0.", "norm_output": True}, (), {"normed": True}),
    "three layers with qk_norm (Qwen3)": (
        {**SPECULATORS, "first": "layers.0.", "layers": 3, "qk_norm": True}, (), {"layers": 3}),
    "keys of SGLang's and ModelOpt's": (
        {"target_model_type": "qwen3_vl_moe", "reuse_target_lm_head": True, "num_local_experts": 16,
         "max_window_layers": 48, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
         "eagle_config": {AUX: [1, 3, 4], "use_aux_hidden_state": True, "use_last_layernorm": True,
                          "use_mtp_layernorm": False, "parallel_draft_step": 4}}, (), {}),
    "two layers (SGLang)": (
        {"first": "layers.0.", "layers": 2}, ("layers.1.hidden_norm.weight",), {"layers": 2}),
}


@pytest.mark.parametrize("name", EAGLE3_HEADS)
def test_eagle3_head(tmp_path, base, name):
    options, extra, flags = EAGLE3_HEADS[name]
    folder, target = base["Llama-3"]
    state, config = make_head("eagle3", **options)
    for seed, n in enumerate(extra):
        width = 3 * H if n.startswith("input_norm") else H
        state[n] = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(seed))
    if "speculators_model_type" in config:
        shape = {k: config.pop(k) for k in list(config) if k in BASE and k != "architectures"}
        config["transformer_layer_config"] = shape
    head = load_head(convert_head(tmp_path, folder, state, config), target, "eagle3")
    hidden, aux = options.get("hidden", H), options.get("aux", 3)
    tokens, features = torch.randint(0, V, (20,)), torch.randn(20, aux * H)
    norms, normed = [state[n] for n in extra if "layers" not in n], features
    if norms:
        parts = features.chunk(len(norms), -1)
        normed = torch.cat([rms(part, norm) for part, norm in zip(parts, norms)], -1)
    fused = F.linear(normed, state["fc.weight"], state.get("fc.bias"))
    assert close([head.fuse(features)], [fused])
    embed = state.get("embed_tokens.weight", target.embed.weight)
    feature = torch.randn(20, hidden)
    expected = reference_eagle3(
        state, embed, state["lm_head.weight"], tokens, feature, options.get("hd", 12),
        options.get("first", "midlayer."), **flags)
    assert close(run_head(head, tokens, feature), expected)
    ids = state["t2d"].nonzero()[:, 0] if "t2d" in state else torch.arange(V)
    assert torch.equal(head.draft_ids, ids)
    assert head.args.aux_layers == {2: (2, 6), 3: (2, 4, 5), 5: (2, 3, 4, 5, 6)}[aux]
    plain, drafted = (
        Engine(target, drafter, compile=False, max_seq_len=60).generate([[1, 2, 3]], Sampling(30))[0].ids
        for drafter in (None, HeadDrafter(head, TreeShape(8, 2, 3))))
    assert drafted == plain


def test_head_without_lm_head_uses_the_target_lm_head(tmp_path, base):
    folder, target = base["Llama-3"]
    state, config = make_head("eagle3", draft=V)
    own = state.pop("lm_head.weight")
    none = convert_head(tmp_path, folder, state, config | {"draft_vocab_size": None}, "none")
    head = load_head(none, target)
    assert head.lm_head is target.lm_head
    state["embed_tokens.weight"] = own
    tied = config | {"tie_word_embeddings": True}
    head = load_head(convert_head(tmp_path, folder, state, tied, "tied"), target)
    assert torch.equal(head.lm_head.weight, own)
    assert head.lm_head.weight.data_ptr() == head.embed.weight.data_ptr()


@pytest.mark.parametrize("key", ["d2t", "token_map", "t2d"])
def test_draft_ids_are_sorted(tmp_path, base, key):
    """A vocabulary given as a mask is sorted already, and may be given without d2t."""
    state, config = make_head("eagle3")
    folder, weights = base["Llama-3"][0], "model.safetensors"
    expected = load_file(convert_head(tmp_path, folder, state, config, "ascending") / weights)
    mask, at = state.pop("t2d"), torch.arange(len(state["d2t"]))
    order = at if key == "t2d" else at.flip(0).roll(5)
    ids = (at + state.pop("d2t"))[order]
    state |= {"lm_head.weight": state["lm_head.weight"][order].clone(),
              key: {"d2t": ids - at, "token_map": ids, "t2d": mask}[key]}
    found = load_file(convert_head(tmp_path, folder, state, config, "shuffled") / weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


AMBIGUOUS = {  # what the files leave open -> (config, words of the error, flags, the field that they set)
    "norm_before_residual": (
        {"speculators_model_type": "eagle3"}, "--no-norm-before-residual", ["--norm-before-residual"],
        ("norm_before_residual", True)),
    "norm_output": (
        {"norm_output": True}, "--recycle raw", ["--recycle", "normed"], ("recycle_normed", True)),
    "aux layers": (
        {"eagle_config": {AUX: [3, 4, 5]}}, "4,5,6 if outputs", ["--aux-layers", "3,4,5"],
        ("aux_layers", [3, 4, 5])),
    "aux layers, twice": (
        {"eagle_config": {AUX: [1, 3, 4]}, AUX: [2, 3, 5]}, "pass --aux-layers",
        ["--aux-layers", "2,4,5"], ("aux_layers", [2, 4, 5])),
    "four hidden states": (
        {"aux": 4}, "reads 4 hidden states", ["--aux-layers", "1,2,3,4"], ("aux_layers", [1, 2, 3, 4])),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_layouts_need_a_flag(tmp_path, base, capsys, name):
    changes, words, flags, (key, value) = AMBIGUOUS[name]
    state, config = make_head("eagle3", first="layers.0.", **changes)
    head, target = write_head(tmp_path / "h", state, config), base["Llama-3"][0]
    command = ["--checkpoint", str(head), "--target", str(target), "--out", str(tmp_path / "o")]
    assert convert_main(command) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith("error: ") and words in err[0]
    assert not (tmp_path / "o").exists()
    assert convert_main([*command, *flags]) == 0 and read_config(tmp_path / "o", "eagle3")[key] == value


# -- export --------------------------------------------------------------------------------------------------


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
CHANGES = (  # to an EAGLE-3 head
    *({"aux_layers": layers} for layers in ((3, 5, 7), (1, 2, 4), (2, 4, 8), (3, 5, 8))),
    {"windows": (9,), "activation": "gelu_tanh", "rope_scaling": YARN}, {"norm_before_residual": True},
    {"recycle_normed": True}, {"feature_norm": "each"}, {"feature_norm": "all"}, {"draft_window": 77},
)
ROUND_TRIPS = [
    (layout, changes) for changes in ({}, *CHANGES) for layout in ("sglang", "speculators")
]


def head_of(head: Head, target, changes: dict) -> Head:
    """Return a head whose weights are exact in bfloat16, with changes to its config."""
    if changes:
        state, head = own_state(head), model_of("eagle3", **dataclasses.asdict(head.args) | changes)
        new = {name for name, tensor in head.named_parameters() if name not in state}
        for name in new:
            nn.init.normal_(head.get_parameter(name))
        head.load_state_dict(state, strict=not new)
        head.use_target(target)
    return copy_head(copy_head(head, target, torch.bfloat16), target, torch.float32)


@pytest.mark.parametrize("layout, changes", ROUND_TRIPS, ids=str)
def test_export_round_trip(golden, models, tmp_path, layout, changes):
    """Converting an exported head restores it bit for bit; unsupported heads are rejected."""
    target, head = models
    head = head_of(head, target, changes)
    if layout == "sglang" and any("norm" in name for name in changes):
        with pytest.raises(InputError, match=r"no layout supports|not supported in the sglang layout"):
            export(head, tmp_path / "out", layout, {})
        return
    export(head, tmp_path / "out", layout, read_config(golden))
    folder = convert(tmp_path / "out", tmp_path / "again", golden, quiet=True, dtype="fp32")
    back = load_head(folder, target)
    assert back.args == head.args
    torch.testing.assert_close(own_state(back), own_state(head), rtol=0, atol=0)


@pytest.mark.parametrize("name, family", (("Llama-3", "Llama"), ("Phi-3", "Phi3")))
def test_speculators_configs_name_the_targets_architecture(models, tmp_path, name, family):
    _, target = converted(tmp_path, name)
    export(models[1], tmp_path / "head", "speculators", read_config(target))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == [f"{family}ForCausalLM"]


def test_export_command(golden, tmp_path):
    command = ["--head", str(golden / "eagle3"), "--checkpoint", str(golden), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang's ids are layer outputs
    assert main([*command, "--force", "--layout", "speculators"]) == 0
