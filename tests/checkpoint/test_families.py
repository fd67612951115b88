"""Every family of targets and every layout of heads: tiny random ones in their published layout, converted,
compared.

Targets against transformers (logits to 1e-4 relative, 64 greedy tokens, plain and speculative), heads against
a plain reading of their papers below, which works on the tensors as published.
"""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.families import LAYERS, TARGETS, YARN, H, V, make_target
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from checkpoint.folder import read_config
from checkpoint.head_layouts import Answers
from checkpoint.loading import load_head, load_model
from common.errors import InputError
from convert_checkpoint import main
from drafters.eagle import Eagle, StaticEagle
from engine.decoder import Decoder
from sampling.options import Sampling
from tree import EAGLE1_TREE, TreeShape


@torch.no_grad()
def greedy(theirs, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def reference_text(theirs) -> tuple[list[list[int]], list[list[int]]]:
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, V, (n,), generator=g).tolist() for n in (3, 17)]
    return prompts, [greedy(theirs, p, 64) for p in prompts]


@pytest.mark.parametrize("name", TARGETS)
def test_target(tmp_path, name):
    theirs = make_target(tmp_path / "in", name)
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    target, _ = load_model(folder)
    tokens = torch.randint(0, V, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(tokens).logits
        got = target.logits(target.causal(tokens)[0])
    error = ((got - want).abs().max() / want.abs().max()).item()
    print(f"{name}: max relative error {error:.1e}")
    assert error < 1e-4
    prompts, texts = reference_text(theirs)
    options = {"compile": False, "max_seq_len": 120, "batch": 2}
    decoders = {"plain": Decoder(target, **options)}
    for kind in ("eagle", "eagle3"):
        state, config = make_head(kind)
        head = load_head(
            convert(write_head(tmp_path / kind, state, config), target=folder, quiet=True), target, kind
        )
        decoders[kind] = Decoder(target, Eagle(head, TreeShape(12, 2, 4)), **options)
        if kind == "eagle":
            decoders["static tree"] = Decoder(target, StaticEagle(head, EAGLE1_TREE), **options)
    for way, decoder in decoders.items():
        assert [o.ids for o in decoder.generate(prompts, Sampling(64))] == texts, way


# -- heads -----------------------------------------------------------------------------------------------------------

BASE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": H, "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
}


def make_head(kind: str, draft=40, hidden=H, target=H, hd=12, kv=2, layers=1, first="midlayer.", bias=False, qkv_bias=False,
              qk_norm=False, aux=3, embedding=False, seed=7, **config):
    """A random head as published: (tensors, config)."""
    g = torch.Generator().manual_seed(seed)
    wide = hidden if kind == "eagle" else 2 * hidden
    shapes = {"fc.weight": (hidden, 2 * hidden if kind == "eagle" else aux * target)}
    for k in range(layers):
        p = first if k == 0 and kind == "eagle3" else f"layers.{k}."
        shapes |= {
            p + "self_attn.q_proj.weight": (4 * hd, wide if k == 0 else hidden),
            p + "self_attn.k_proj.weight": (kv * hd, wide if k == 0 else hidden),
            p + "self_attn.v_proj.weight": (kv * hd, wide if k == 0 else hidden),
            p + "self_attn.o_proj.weight": (hidden, 4 * hd), p + "post_attention_layernorm.weight": (hidden,),
            p + "mlp.gate_proj.weight": (64, hidden), p + "mlp.up_proj.weight": (64, hidden),
            p + "mlp.down_proj.weight": (hidden, 64),
        }
        if qkv_bias:
            shapes |= {f"{p}self_attn.{x}_proj.bias": (n * hd,) for x, n in (("q", 4), ("k", kv), ("v", kv))}
        if qk_norm:
            shapes |= {f"{p}self_attn.{x}_norm.weight": (hd,) for x in "qk"}
        if kind == "eagle3":
            shapes[p + "input_layernorm.weight"] = (hidden,)
            if k == 0:
                shapes[p + "hidden_norm.weight"] = (hidden,)
    if kind == "eagle3":
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft, hidden)}
    if bias:
        shapes["fc.bias"] = (hidden,)
    if embedding:
        shapes["embed_tokens.weight"] = (V, hidden)
    state = {
        n: (1 if n.endswith("norm.weight") else 0) + 0.2 * torch.randn(s, generator=g) for n,
        s in shapes.items()
    }
    if kind == "eagle3" and draft != V:
        ids = torch.randperm(V, generator=g)[:draft].sort().values
        state["d2t"], state["t2d"] = ids - torch.arange(draft), torch.zeros(
            V, dtype=torch.bool
        ).index_fill(0, ids, True)
    given = {**BASE, "hidden_size": hidden, "num_key_value_heads": kv, "num_hidden_layers": layers, **config}
    if kind == "eagle3":
        given.setdefault("draft_vocab_size", draft)
    return state, given


def write_head(folder: Path, state: dict, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors")
    return folder


def rms(x, weight):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def attention_and_mlp(get, residual, a, hd, kv, theta=1e4):
    """One layer as the papers write it, on published tensors: `get(name)`; a is the normed input, causal."""
    T = a.shape[0]
    q, k, v = (
        F.linear(a, get(f"self_attn.{x}_proj.weight"), get(f"self_attn.{x}_proj.bias")).view(T, -1, hd)
        for x in "qkv"
    )
    if get("self_attn.q_norm.weight") is not None:
        q, k = rms(q, get("self_attn.q_norm.weight")), rms(k, get("self_attn.k_norm.weight"))
    angle = torch.arange(T)[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)

    def turned(x):
        even, odd = x[..., : hd // 2], x[..., hd // 2 :]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)

    q, k = turned(q), turned(k)
    out = torch.empty_like(q)
    for h in range(q.shape[1]):
        g = h * kv // q.shape[1]
        scores = (q[:, h] @ k[:, g].T) / hd**0.5
        out[:, h] = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1) @ v[:, g]
    x = residual + out.flatten(1) @ get("self_attn.o_proj.weight").T
    m = rms(x, get("post_attention_layernorm.weight"))
    return x + (
        F.silu(m @ get("mlp.gate_proj.weight").T) * (m @ get("mlp.up_proj.weight").T)
    ) @ get("mlp.down_proj.weight").T


def papers_eagle1(state, embed, lm_head, tokens, feature, hd, kv):
    """(fed back, logits): arXiv 2401.15077."""
    x = F.linear(torch.cat((embed[tokens], feature), -1), state["fc.weight"], state.get("fc.bias"))
    x = attention_and_mlp(lambda n: state.get(f"layers.0.{n}"), x, x, hd, kv)
    return x, x @ lm_head.T


def papers_eagle3(
    state, embed, lm_head, tokens, feature, hd, kv, first, layers=1, before=False, normed=False
):
    """(fed back, logits): arXiv 2503.01840 and its variants; `feature` is already through fc."""
    u = rms(feature, state[first + "hidden_norm.weight"])
    a = torch.cat((rms(embed[tokens], state[first + "input_layernorm.weight"]), u), -1)
    x = attention_and_mlp(lambda n: state.get(first + n), u if before else feature, a, hd, kv)
    for k in range(1, layers):
        norm = state.get(f"layers.{k}.hidden_norm.weight", state[f"layers.{k}.input_layernorm.weight"])
        x = attention_and_mlp(lambda n, k=k: state.get(f"layers.{k}.{n}"), x, rms(x, norm), hd, kv)
    out = rms(x, state["norm.weight"])
    return out if normed else x, out @ lm_head.T


def ours(head, tokens, feature):
    T = len(tokens)
    caches = head.caches(1, 64, torch.float32, "cpu")
    at = torch.arange(T)[None]
    with torch.no_grad():
        x = head(tokens[None], feature[None], at, at, torch.arange(64) <= at[..., None], caches)
        return x[0], head.logits(x)[0]


def close(got, want, tolerance=1e-5):
    return all((g - w).abs().max() < tolerance * w.abs().max() for g, w in zip(got, want))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder, target) of a small LLaMA, and of one with tied embeddings."""
    place, found = tmp_path_factory.mktemp("base"), {}
    for name in ("Llama-3", "Llama-3.2"):
        make_target(place / f"{name} in", name)
        folder = convert(place / f"{name} in", place / name, quiet=True)
        found[name] = folder, load_model(folder)[0]
    return found


EAGLE1_HEADS = {
    "bias in the file and not in the config": ({"bias": True}, "Llama-3"),
    "no bias in the file, none denied": ({}, "Llama-3"),
    "qkv bias (Qwen2)": ({"qkv_bias": True}, "Llama-3"),
    "own KV heads": ({"kv": 4}, "Llama-3"),
    "own embedding": ({"embedding": True}, "Llama-3"),
    "tied target": ({}, "Llama-3.2"),
}


@pytest.mark.parametrize("name", EAGLE1_HEADS)
def test_eagle1_head(tmp_path, base, name):
    options, which = EAGLE1_HEADS[name]
    folder, target = base[which]
    state, config = make_head("eagle", **options)
    head = load_head(
        convert(write_head(tmp_path / "h", state, config), tmp_path / "out", folder, quiet=True), target,
        "eagle"
    )
    tokens, features = torch.randint(0, V, (20,)), torch.randn(20, H)
    embed = state.get("embed_tokens.weight", target.embed.weight)
    lm_head = (target.lm_head or target.embed).weight
    assert close(
        ours(head, tokens, features),
        papers_eagle1(state, embed, lm_head, tokens, features, 12, options.get("kv", 2))
    )
    # Its features are normed target states.
    assert close([head.fuse(features)], [rms(features, target.norm.weight)])
    assert head.args.aux_layers == (LAYERS,)


def test_eagle1_in_vllms_copies(tmp_path, base):
    """Everything nested, `model.` in front, the target's lm_head and embedding in the file: the same head."""
    folder, target = base["Llama-3"]
    state, config = make_head("eagle")
    plain = convert(write_head(tmp_path / "a", state, config), tmp_path / "plain", folder, quiet=True)
    copied = {f"model.{n}": t for n, t in state.items()} | {
        "model.embed_tokens.weight": target.embed.weight, "lm_head.weight": target.lm_head.weight}
    copy = convert(
        write_head(tmp_path / "b", copied, {"model_type": "eagle", "model": config}), tmp_path / "copy",
        folder, quiet=True
    )
    a, b = load_file(plain / "model.safetensors"), load_file(copy / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


SPECULATORS = {"speculators_model_type": "eagle3", "norm_before_residual": False}
EAGLE3_HEADS = {  # what differs, extra tensors, flags of the paper's reading
    "SafeAILab": ({}, {}, {}),
    "SafeAILab, the whole vocabulary": ({"draft": V}, {}, {}),
    "SpecForge, own head size and KV heads": (
        {"hd": 8, "kv": 1, "head_dim": 8, "first": "layers.0."}, {}, {}
    ),
    "a head_dim that the config gets wrong": ({"hd": 8, "head_dim": 12}, {}, {}),
    "fc bias": ({"bias": True}, {}, {}),
    "own embedding": ({"embedding": True}, {}, {}),
    "another width": ({"hidden": 32, "embedding": True, "target_hidden_size": H}, {}, {}),
    "five features": (
        {"aux": 5, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}}, {}, {}
    ),
    "fc_norm (speculators)": (
        {**SPECULATORS, "first": "layers.0.", "fc_norm": True}, "fc_norm.{}.weight", {}
    ),
    "aux_norm (SGLang)": (
        {"first": "layers.0."}, ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"), {}
    ),
    "norm_before_fc": (
        {**SPECULATORS, "first": "layers.0.", "norm_before_fc": True}, ("input_norm.weight",), {}
    ),
    "norm_before_residual": (
        {**SPECULATORS, "first": "layers.0.", "norm_before_residual": True}, {}, {"before": True}
    ),
    "norm_output": ({**SPECULATORS, "first": "layers.0.", "norm_output": True}, {}, {"normed": True}),
    "three layers": ({**SPECULATORS, "first": "layers.0.", "layers": 3}, {}, {"layers": 3}),
    "two layers with qk_norm (Qwen3)": (
        {**SPECULATORS, "first": "layers.0.", "layers": 2, "qk_norm": True}, {}, {"layers": 2}
    ),
    "two layers (SGLang)": (
        {"first": "layers.0.", "layers": 2}, ("layers.1.hidden_norm.weight",), {"layers": 2}
    ),
}


@pytest.mark.parametrize("name", EAGLE3_HEADS)
def test_eagle3_head(tmp_path, base, name):
    options, extra, flags = EAGLE3_HEADS[name]
    folder, target = base["Llama-3"]
    state, config = make_head("eagle3", **options)
    names = [extra.format(j) for j in range(3)] if isinstance(extra, str) else list(extra)
    for n in names:
        width = 3 * H if n.startswith("input_norm") else H
        state[n] = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(len(n)))
    # The layer's shape is nested, outside only what is speculators' own.
    if "speculators_model_type" in config:
        shape = {k: config.pop(k) for k in list(config) if k in BASE and k != "architectures"}
        config["transformer_layer_config"] = shape
    head = load_head(
        convert(write_head(tmp_path / "h", state, config), tmp_path / "out", folder, quiet=True), target,
        "eagle3"
    )
    hidden, aux = options.get("hidden", H), options.get("aux", 3)
    tokens, features = torch.randint(0, V, (20,)), torch.randn(20, aux * H)
    normed = features
    if names and names[0].startswith("input_norm"):
        normed = rms(features, state["input_norm.weight"])
    elif names and "layers" not in names[0]:
        normed = torch.cat([rms(part, state[n]) for n, part in zip(names, features.chunk(3, -1))], -1)
    fused = F.linear(normed, state["fc.weight"], state.get("fc.bias"))
    assert close([head.fuse(features)], [fused])
    embed = state.get("embed_tokens.weight", target.embed.weight)
    feature = torch.randn(20, hidden)
    want = papers_eagle3(state, embed, state[
        "lm_head.weight"
    ], tokens, feature, options.get("hd", 12), options.get("kv", 2),
                         options.get("first", "midlayer."), **flags)
    assert close(ours(head, tokens, feature), want)
    ids = state["t2d"].nonzero()[:, 0] if "t2d" in state else torch.arange(V)
    assert torch.equal(head.draft_ids, ids)
    prompt = [3, 1, 4]
    plain = Decoder(target, compile=False, max_seq_len=100).generate([prompt], Sampling(40))[0].ids
    fast = Decoder(
        target, Eagle(head, TreeShape(12, 2, 4)), compile=False, max_seq_len=100
    ).generate([prompt], Sampling(40))[0]
    assert fast.ids == plain


def test_a_head_without_lm_head_uses_the_targets(tmp_path, base):
    folder, target = base["Llama-3"]
    state, config = make_head("eagle3", draft=V)
    own = state.pop("lm_head.weight")
    none = {**config, "draft_vocab_size": None}
    head = load_head(
        convert(write_head(tmp_path / "a", state, none), tmp_path / "x", folder, quiet=True), target
    )
    assert head.lm_head is target.lm_head
    state["embed_tokens.weight"] = own
    tied = {**config, "tie_word_embeddings": True}
    head = load_head(
        convert(write_head(tmp_path / "b", state, tied), tmp_path / "y", folder, quiet=True), target
    )
    assert torch.equal(
        head.lm_head.weight, own
    ) and head.lm_head.weight.data_ptr() == head.embed.weight.data_ptr()


def test_a_narrow_head_cannot_borrow_a_wide_lm_head(tmp_path, base):
    state, config = make_head("eagle3", draft=V, hidden=32, embedding=True, target_hidden_size=H)
    del state["lm_head.weight"]
    head = write_head(tmp_path / "h", state, config | {"draft_vocab_size": None})
    with pytest.raises(InputError, match="no lm_head of its own"):
        convert(head, tmp_path / "o", base["Llama-3"][0], quiet=True)


def test_the_mask_alone_tells_the_draft_ids(tmp_path, base):
    state, config = make_head("eagle3")
    ids = torch.arange(state["d2t"].numel()) + state.pop("d2t")
    state["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    folder = convert(
        write_head(tmp_path / "h", state, config), tmp_path / "o", base["Llama-3"][0], quiet=True
    )
    assert torch.equal(load_file(folder / "model.safetensors")["draft_ids"], ids)


def test_biases_are_found_in_the_file_whatever_the_config_says(tmp_path, base):
    state, config = make_head("eagle3", qkv_bias=True, attention_bias=True)
    folder = convert(
        write_head(tmp_path / "h", state, config), tmp_path / "o", base["Llama-3"][0], quiet=True
    )
    assert read_config(folder)["qkv_bias"]


def test_an_id_that_only_an_input_can_have(tmp_path, base):
    ids = [0, 3, LAYERS]
    state, config = make_head("eagle3", eagle_config={AUX: ids})
    folder = convert(
        write_head(tmp_path / "h", state, config), tmp_path / "o", base["Llama-3"][0], quiet=True
    )
    assert read_config(folder)["aux_layers"] == ids


AUX = "eagle_aux_hidden_state_layer_ids"
QUESTIONS = {  # what the files leave open -> (config, words of the question, answer, what it sets)
    "norm_before_residual": (
        {"speculators_model_type": "eagle3"}, "--no-norm-before-residual", ["--norm-before-residual"],
        ("norm_before_residual", True)),
    "norm_before_residual, no": (
        {"speculators_model_type": "eagle3"}, "--norm-before-residual", ["--no-norm-before-residual"],
        ("norm_before_residual", False)),
    "norm_output": (
        {"norm_output": True}, "--recycle raw", ["--recycle", "normed"], ("recycle_normed", True)
    ),
    "norm_output, raw": (
        {"norm_output": True}, "--recycle raw", ["--recycle", "raw"], ("recycle_normed", False)
    ),
    "aux layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}}, "4,5,6 if outputs",
        ["--aux-layers", "3,4,5"],
        ("aux_layers", [3, 4, 5])),
    "aux layers, twice": (
        {"eagle_config": {AUX: [1, 3, 4]}, AUX: [2, 3, 5]}, "--aux-layers 2,3,5 or --aux-layers 2,4,5",
        ["--aux-layers", "2,4,5"],
        ("aux_layers", [2, 4, 5])),
    "as many states as fc is wide": (
        {"aux": 4}, "takes 4 states", ["--aux-layers", "1,2,3,4"], ("aux_layers", [1, 2, 3, 4])
    ),
    "norm_output, false": (
        {"norm_output": False}, "--recycle raw", ["--recycle", "raw"], ("recycle_normed", False)
    ),
    "a speculator by its name": (
        {"architectures": ["Eagle3Speculator"]}, "--norm-before-residual", ["--norm-before-residual"],
        ("norm_before_residual", True)),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_cannot_be_detected_is_asked(tmp_path, base, capsys, name):
    changes, words, answer, (key, value) = QUESTIONS[name]
    state, config = make_head("eagle3", first="layers.0.", **changes)
    head, target = write_head(tmp_path / "h", state, config), base["Llama-3"][0]
    command = ["--checkpoint", str(head), "--target", str(target), "--out", str(tmp_path / "o")]
    assert main(command) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith("error: ") and words in err[0] and not (tmp_path / "o").exists()
    assert main([*command, *answer]) == 0 and read_config(tmp_path / "o", "eagle3")[key] == value


REFUSED = {
    "an input norm in layer 0": (
        ("eagle",), {"layers.0.input_layernorm.weight": torch.ones(H)}, {}, "no such norm"
    ),
    "a head of two layers": (("eagle",), {}, {"num_hidden_layers": 2}, "2 layers"),
    "another kind of speculator": (("eagle3",), {}, {"speculators_model_type": "peagle"}, "peagle"),
    "two kinds of norm before fc": (
        ("eagle3",), {"fc_norm.0.weight": torch.ones(H), "input_norm.weight": torch.ones(3 * H)}, {},
        "only one"),
    "a missing fc_norm": (("eagle3",), {"fc_norm.0.weight": torch.ones(H)}, {}, "fc_norm.1.weight"),
    "a left-over tensor": (
        ("eagle3",), {"verifier.weight": torch.ones(3)}, {}, "unexpected tensor verifier.weight"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_heads(tmp_path, base, name):
    (kind,), extra, changes, words = REFUSED[name]
    state, config = make_head(kind)
    head = write_head(tmp_path / "h", state | extra, config | changes)
    with pytest.raises(InputError, match=words):
        convert(head, tmp_path / "o", base["Llama-3"][0], answers=Answers(), quiet=True)


LENGTHS = {  # config keys -> the longest context
    "as it says": ({}, 512),
    "Vicuna-16k": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
    "Qwen2.5's recipe": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048
    ),
    "yarn, stretched already": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512
    ),
    "yarn, the original outside": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 128}, 512
    ),
    "llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64}}, 512),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_longest_context(tmp_path, name):
    changes, longest = LENGTHS[name]
    make_target(tmp_path / "in", "Llama-3")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": 512}
    del config["rope_parameters"]
    file.write_text(json.dumps(config | changes))
    target, written = load_model(convert(tmp_path / "in", tmp_path / "out", quiet=True))
    assert written["max_seq_len"] == longest
    if "yarn" in name and longest == 512:
        assert target.args.rope_scaling["original_max_position_embeddings"] == 128


def test_windows_are_off_unless_a_family_has_them(tmp_path):
    for name, window, off in (("Qwen2", 64, True), ("Mistral", None, True), ("Mistral", ..., False)):
        make_target(tmp_path / "in", name)
        file = tmp_path / "in" / "config.json"
        config = json.loads(file.read_text()) | {"max_position_embeddings": 8192, "sliding_window": window}
        config.pop("use_sliding_window", None)
        config.pop("layer_types", None)
        if window is ...:
            del config["sliding_window"]  # absent: 4096, transformers' default for Mistral
        file.write_text(json.dumps(config))
        if off:
            convert(tmp_path / "in", tmp_path / "out", quiet=True, force=True)
        else:
            with pytest.raises(InputError, match="sliding_window 4096"):
                convert(tmp_path / "in", tmp_path / "other", quiet=True)


REFUSED_TARGETS = {
    "dynamic RoPE": (
        "Llama-3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "keys already in the cache"),
    "a sliding window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
    "Mistral's window": ("Mistral", {"sliding_window": 64}, "sliding_window 64"),
    "layers with a window": (
        "Qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"
    ),
    "layers without experts": ("Qwen3-MoE", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "every other layer without experts": ("Qwen3-MoE", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    "no number of experts": ("Qwen3-MoE", {"num_experts": 0}, "number of experts"),
    "more layers than can be": ("Llama-3", {"num_hidden_layers": 10**9}, "not plausible"),
}


@pytest.mark.parametrize("name", REFUSED_TARGETS)
def test_refused_targets(tmp_path, name):
    which, changes, words = REFUSED_TARGETS[name]
    make_target(tmp_path / "in", which)
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "in", tmp_path / "out", quiet=True)


def test_experts_of_few_rows_and_of_many(tmp_path):
    """The two ways of computing a mixture agree: rows alone (weights gathered) and together (every expert).
    """
    make_target(tmp_path / "in", "Qwen3-MoE")
    target, _ = load_model(convert(tmp_path / "in", tmp_path / "out", quiet=True))
    experts, x = target.layers[3].mlp, torch.randn(1, 30, H)
    with torch.no_grad():
        together = experts(x, torch.zeros_like(x))
        alone = torch.cat([experts(x[:, i : i + 1], torch.zeros(1, 1, H)) for i in range(30)], dim=1)
    assert (together - alone).abs().max() < 1e-5 * together.abs().max()
    assert 1 * experts.used < experts.router.out_features <= 30 * experts.used  # both branches ran


# -- GGUF of every family --------------------------------------------------------------------------------------------


def write_gguf(file: Path, theirs, arch: str, extra=lambda w: None) -> Path:
    """As llama.cpp's converter would: its names, its metadata, its interleaved q/k for arch llama."""
    import gguf

    c, state, w = theirs.config, theirs.state_dict(), gguf.GGUFWriter(file, arch)
    hd = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(hd)
    w.add_value_length(hd)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    experts = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        if arch == "qwen3moe":
            w.add_expert_feed_forward_length(c.moe_intermediate_size)

    def put(name: str, tensor: torch.Tensor) -> None:
        w.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))

    put("token_embd.weight", state["model.embed_tokens.weight"])
    put("output_norm.weight", state["model.norm.weight"])
    if not c.tie_word_embeddings:
        put("output.weight", state["lm_head.weight"])
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
             "mlp.gate_proj": "ffn_gate",
             "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp"}
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        for x, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads), ("v", None)):
            for kind in ("weight", "bias"):
                if (t := state.get(f"{p}self_attn.{x}_proj.{kind}")) is not None:
                    if heads and arch == "llama":
                        t = t.view(heads, 2, hd // 2, -1).transpose(1, 2).reshape(t.shape)
                    put(f"blk.{i}.attn_{x}.{kind}", t)
        for theirs_name, name in names.items():
            if f"{p}{theirs_name}.weight" in state:
                put(f"blk.{i}.{name}.weight", state[f"{p}{theirs_name}.weight"])
        if experts:  # transformers 5 holds them stacked: gate above up
            gate_up, down = state[f"{p}mlp.experts.gate_up_proj"], state[f"{p}mlp.experts.down_proj"]
            gate, up = gate_up.chunk(2, dim=1)
            for name, t in (("gate", gate), ("up", up), ("down", down)):
                put(f"blk.{i}.ffn_{name}_exps.weight", t)
    extra(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file


def test_gguf_yarn_and_window(tmp_path):
    import gguf

    theirs = make_target(tmp_path / "in", "Qwen3 tied, yarn")

    def yarn(w):
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(YARN["factor"])
        w.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])

    target, _ = load_model(
        convert(write_gguf(tmp_path / "m.gguf", theirs, "qwen3", yarn), tmp_path / "out", quiet=True)
    )
    tokens = torch.randint(0, V, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = theirs(tokens).logits, target.logits(target.causal(tokens)[0])
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    file = write_gguf(tmp_path / "w.gguf", theirs, "qwen3", lambda w: w.add_sliding_window(64))
    with pytest.raises(InputError, match="sliding_window 64"):
        convert(file, tmp_path / "w", quiet=True)


@pytest.mark.parametrize(
    "name,arch",
    [("Llama-3", "llama"), ("Qwen2", "qwen2"), (
        "Qwen2.5 tied", "qwen2"
    ), ("Qwen3", "qwen3"), ("Mixtral", "llama"),
     ("Qwen3-MoE", "qwen3moe")],
)
def test_gguf_gives_the_same_tensors(tmp_path, name, arch):
    theirs = make_target(tmp_path / "in", name)
    a = convert(tmp_path / "in", tmp_path / "a", quiet=True)
    b = convert(write_gguf(tmp_path / "m.gguf", theirs, arch), tmp_path / "b", quiet=True)
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    same = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope_base", "qkv_bias", "qk_norm", "num_experts",
            "experts_per_token", "intermediate_size", "tie_embeddings")
    one, two = read_config(a), read_config(b)
    assert [one.get(k) for k in same] == [two.get(k) for k in same]


# -- chat templates of models that carry none ------------------------------------------------------------------------

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite"
    " answers to the user's questions."
)
LLAMA2 = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being"
    " safe.  Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal"
    " content. Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering"
    " something not correct. If you don't know the answer to a question, please don't share false information."
)
TALK = [
    {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"}
]


def with_sentencepiece(folder: Path) -> Path:
    import sentencepiece

    make_target(folder, "Llama-2")
    text = folder.parent / "text.txt"
    text.write_text("\n".join(f"some words to learn {i} {VICUNA}" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=110, byte_fallback=False,
        hard_vocab_limit=False,
        minloglevel=2, model_type="bpe", character_coverage=1.0)
    return folder


@pytest.mark.parametrize("source,chat,want", [
    ("vicuna-7b-v1.3", TALK[:1], f"<s>{VICUNA} USER: q1 ASSISTANT:"),
    ("vicuna-7b-v1.3", TALK, f"<s>{VICUNA} USER: q1 ASSISTANT: a1</s>USER: q2 ASSISTANT:"),
    ("vicuna-7b-v1.3", [{"role": "system", "content": "Be."}, *TALK[:1]], "<s>Be. USER: q1 ASSISTANT:"),
    ("Llama-2-7b-chat-hf", [{"role": "system", "content": "Be."}, *TALK],
     "<s>[INST] <<SYS>>\nBe.\n<</SYS>>\n\nq1 [/INST] a1 </s><s>[INST] q2 [/INST]"),
    ("Llama-2-7b-chat-hf", [{"role": "system", "content": ""}, *TALK[:1]], "<s>[INST] q1 [/INST]"),
])
def test_built_in_templates(tmp_path, source, chat, want):
    """Chosen by the published name, rendered to FastChat's strings."""
    from tokens.tokenizer import Tokenizer

    ours = Tokenizer.load(convert(with_sentencepiece(tmp_path / source), tmp_path / "out", quiet=True))
    assert ours.render(chat) == want
    assert ours.chat(chat)[0] == ours.bos_id and ours.chat(chat).count(ours.bos_id) == want.count("<s>")


def test_the_default_system_prompt_of_llama2(tmp_path):
    from tokens.tokenizer import Tokenizer

    ours = Tokenizer.load(
        convert(with_sentencepiece(tmp_path / "llama-2-13b-chat"), tmp_path / "out", quiet=True)
    )
    assert ours.render(TALK[:1]) == f"<s>[INST] <<SYS>>\n{LLAMA2}\n<</SYS>>\n\nq1 [/INST]"


def test_templates_by_flag(tmp_path, capsys):
    from tokens.tokenizer import Tokenizer

    source = with_sentencepiece(tmp_path / "mystery")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    command = ["--checkpoint", str(source), "--out"]
    for flags, has in (
        ([], False), (["--template", "vicuna"], True), (["--template", str(tmp_path / "mine.jinja")], True)
    ):
        assert main([*command, str(tmp_path / f"o{len(flags)}{flags[-1:] == ['vicuna']}"), *flags]) == 0
        assert Tokenizer.load(tmp_path / f"o{len(flags)}{flags[-1:] == ['vicuna']}").has_template is has
    assert main([*command, str(tmp_path / "bad"), "--template", "nonsense"]) == 1
    assert "--template nonsense" in capsys.readouterr().err and not (tmp_path / "bad").exists()
