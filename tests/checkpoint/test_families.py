"""Every family of targets: tiny random ones in their published layout, converted, against transformers.

Logits agree to 1e-4 relative, and 64 greedy tokens are equal, with plain and with speculative decoding. One
of the prompts is longer than the windows of families that have one.
"""
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers.blocks import published
from helpers.families import GEMMA3, GPT_OSS_YARN, TARGETS, WINDOW, WINDOWS, H, V, make_target
from helpers.heads import make_head, write_head
from helpers.sources import write_gguf
from safetensors.torch import load_file
from shapes import SHAPES

from checkpoint.convert import convert
from checkpoint.families import model_fields, target_fields
from checkpoint.folder import check_config, read_config
from checkpoint.huggingface import PUBLISHED
from checkpoint.loading import load_head, load_model
from checkpoint.source import Source
from common.errors import InputError
from drafters import Drafting
from drafters.block import PEagle
from drafters.eagle import Eagle, StaticEagle
from drafters.lookup import Lookup
from engine.engine import Engine
from engine.runtime import Runtime
from engine.target import load_target
from kernels.choose import choose_backend
from sampling.options import Sampling
from tree import EAGLE1_TREE, TreeShape


@torch.no_grad()
def greedy(reference, prompt: list[int], count: int) -> list[int]:
    """The tokens that a model of transformers goes on with."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def reference_text(reference) -> tuple[list[list[int]], list[list[int]]]:
    """(Prompts, what the reference goes on with)."""
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, V, (n,), generator=g).tolist() for n in (3, WINDOW + 7)]
    return prompts, [greedy(reference, p, 64) for p in prompts]


def decoders_of(tmp_path, folder, target, **of_head) -> dict[str, Engine]:
    """Engines of a converted target, by the way they draft. of_head: changes of the heads' configs."""
    options = {"compile": False, "max_seq_len": 120, "batch": 2}
    found = {"plain": Engine(target, **options), "lookup": Engine(target, Lookup(), **options)}
    width = target.args.hidden_size
    for kind in ("eagle", "eagle3"):
        state, config = make_head(kind, hidden=width, target=width, **of_head)
        head_folder = convert(write_head(tmp_path / kind, state, config), target=folder, quiet=True)
        head = load_head(head_folder, target, kind)
        if target.backend:
            target.backend.prepare(head)
        found[kind] = Engine(target, Eagle(head, TreeShape(12, 2, 4)), **options)
        if kind == "eagle":
            found["static tree"] = Engine(target, StaticEagle(head, EAGLE1_TREE), **options)
    return found


WINDOWED = [
    name for name in TARGETS if any(words in name for words in ("window", "Phi-3", "Gemma 3", "gpt-oss"))
]
MIXTURES = "Mixtral", "Qwen3-MoE"
ON_KERNELS = [pytest.param(name, True, marks=pytest.mark.kernels) for name in (*WINDOWED, *MIXTURES)]
IN_PYTORCH = [  # one of each kind of windows; the others differ in what the kernels' rows show, too
    pytest.param(name, False, marks=[pytest.mark.dear] * (
        name in WINDOWED and name not in ("Mistral with its window", "Gemma 3", "gpt-oss")
    )) for name in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize("name, kernels", [*IN_PYTORCH, *ON_KERNELS])
def test_target(tmp_path, name, kernels):
    """Drafted text of a seed is the plain one. On the kernels heads have windows, too."""
    reference = make_target(tmp_path / "in", name)
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    target, config = load_model(folder)
    assert any(config.get("windows", ())) == (name in WINDOWED)
    if kernels:
        assert choose_backend("cpu").prepare(target) and target.layers[0].window in (0, WINDOW)
    tokens = torch.randint(0, V, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        logits = target.logits(target.causal(tokens)[0])
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert error < 1e-4, f"the largest error is {error:.1e} of the largest logit"
    prompts, texts = reference_text(reference)
    decoders = decoders_of(tmp_path, folder, target, **{"sliding_window": 10} if kernels else {})
    for method, decoder in decoders.items():
        assert [o.ids for o in decoder.generate(prompts, Sampling(64))] == texts, method
    assert decoders["eagle3"].passes.drafter.head.layer.window == (10 if kernels else 0)
    plain, *drafted = ([o.ids for o in decoder.generate(prompts, Sampling(16, 1.0, seed=4))]
                       for decoder in decoders.values())
    assert drafted == [plain] * len(drafted)


@pytest.mark.kernels
def test_longrope_beyond_its_original_length(tmp_path):
    """Texts have the long factors from their first token on where there is room for more, which is asked for.
    """
    reference = make_target(tmp_path / "in", "Phi-3 with longrope")
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    loaded = load_target(folder, Runtime(device="cpu", compile=False))
    target, original = loaded.model, 256
    assert loaded.room(Drafting(), 1) == original and target.args.max_seq_len == 512
    tokens = torch.randint(0, V, (1, original + 44), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(target.causal(tokens)[0])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    prompts = [tokens[0, :n].tolist() for n in (original - 50, original + 1)]
    for room, prompt in zip((original, 2 * original), prompts):
        text = greedy(reference, prompt, 30)
        for drafter in None, Lookup():
            engine = Engine(target, drafter, compile=False, max_seq_len=room)
            assert engine.generate([prompt], Sampling(30))[0].ids == text, (room, drafter)


@pytest.mark.kernels
def test_heads_with_yarn_of_a_target_in_mxfp4(tmp_path):
    """In bfloat16 on the kernels, drafted text of gpt-oss' heads is plain text, greedy and of a seed."""
    make_target(tmp_path / "in", "gpt-oss in MXFP4")
    folder = convert(tmp_path / "in", tmp_path / "out", dtype="bf16", quiet=True)
    target, config = load_model(folder)
    assert config["quantization"]["experts"] == "mxfp4" == target.layers[0].mlp.w_down.mode
    assert choose_backend("cpu").prepare(target)
    heads = {"eagle3": make_head("eagle3", hidden=64, target=64), "p-eagle": published("p-eagle", target)}
    drafters = [None, Lookup()]
    for kind, (state, config) in heads.items():
        config |= {"rope_scaling": GPT_OSS_YARN, "rope_theta": None}
        source = write_head(tmp_path / kind, state, config)
        head = load_head(convert(source, target=folder, quiet=True), target, kind)
        assert head.args.rope_scaling["truncate"] is False and head.args.rope_factor > 1.2
        target.backend.prepare(head)
        drafters.append((Eagle if kind == "eagle3" else PEagle)(head, TreeShape(12, 3, 4)))
    prompts = [[*range(5, 5 + n)] for n in (3, WINDOW + 9)]
    samplings = [Sampling(60), Sampling(60, 1.0, seed=3)]
    found = []
    for drafter in drafters:
        engine = Engine(target, drafter, compile=False, max_seq_len=120, batch=2)
        found.append([[o.ids for o in engine.generate(prompts, sampling)] for sampling in samplings])
    assert found[1:] == found[:1] * 3


# As published for gpt-oss-20b, but for keys that say nothing of the model.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}


def test_the_published_config_of_gpt_oss():
    PUBLISHED.check(GPT_OSS_20B)
    source = Source(Path("x"), "GptOssForCausalLM", GPT_OSS_20B, {}, [], None, lambda folder, added: False)
    fields = {"kind": "target", **target_fields(source)}
    assert check_config(fields) == SHAPES["gpt-oss-20b"][0]  # which benchmarks time


SEEN = {  # config keys -> the windows of 8 layers
    "Qwen2's switch is off": ("Qwen2", {"sliding_window": 64}, None),
    "Qwen2's last layers": ("Qwen2", {**WINDOWS, "max_window_layers": 6}, [0] * 6 + [WINDOW] * 2),
    "Qwen2's 28 layers": ("Qwen2", WINDOWS, None),
    "Mistral without one": ("Mistral", {"sliding_window": None}, None),
    "Mistral's default": ("Mistral", {}, [4096] * 8),
    "as long as the context": ("Mistral", {"sliding_window": 8192}, None),
    "LLaMA has none": ("Llama-3", {"sliding_window": 64}, None),
    "Gemma's pattern": ("Gemma 3", {"sliding_window": WINDOW}, [0 if i == 5 else WINDOW for i in range(8)]),
}


@pytest.mark.parametrize("case", SEEN)
def test_which_layers_have_a_window(tmp_path, case):
    name, changes, windows = SEEN[case]
    make_target(tmp_path / "in", name)
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": 8192}
    for key in ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"):
        config.pop(key, None)
    config.pop("sliding_window_pattern", None)
    file.write_text(json.dumps(config | changes))
    assert read_config(convert(tmp_path / "in", tmp_path / "out", quiet=True)).get("windows") == windows


REFUSED_TARGETS = {
    "dynamic RoPE": (
        "Llama-3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "keys already in the cache"),
    "a mixture with a window": ("Qwen3-MoE", WINDOWS, "use_sliding_window"),
    "other kinds of layers": ("Gemma 3", {"layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
    "scores with a soft cap": ("Gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "another limit of the activation": ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not"),
    "experts quantised otherwise": ("gpt-oss", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    "longrope without factors": ("Phi-3", {"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
    "layers without experts": ("Qwen3-MoE", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "more layers than can be": ("Llama-3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
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
    """The two ways to compute a mixture agree: few rows gather the weights of their experts, many run all."""
    make_target(tmp_path / "in", "Qwen3-MoE")
    target, _ = load_model(convert(tmp_path / "in", tmp_path / "out", quiet=True))
    experts, x = target.layers[3].mlp, torch.randn(1, 30, H)
    with torch.no_grad():
        together = experts(x, torch.zeros_like(x))
        alone = torch.cat([experts(x[:, i : i + 1], torch.zeros(1, 1, H)) for i in range(30)], dim=1)
    assert (together - alone).abs().max() < 1e-5 * together.abs().max()
    assert 1 * experts.used < experts.router.out_features <= 30 * experts.used  # both branches ran


# GGUF files of every family


GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_experts(stacks: dict) -> dict:
    """The experts of a layer as a GGUF has them, from transformers' gate_up_proj, down_proj and their biases.
    """
    gate_up, down = stacks["gate_up_proj"], stacks["down_proj"]
    if "down_proj_bias" not in stacks:  # gate above up
        gate, up = gate_up.chunk(2, dim=1)
        return {"gate_exps.weight": gate, "up_exps.weight": up, "down_exps.weight": down}
    gate_up, bias = gate_up.transpose(1, 2), stacks["gate_up_proj_bias"]  # gpt-oss: in turn
    return {
        "gate_exps.weight": gate_up[:, ::2], "up_exps.weight": gate_up[:, 1::2],
        "down_exps.weight": down.transpose(1, 2), "gate_exps.bias": bias[:, ::2],
        "up_exps.bias": bias[:, 1::2], "down_exps.bias": stacks["down_proj_bias"],
    }


def family_gguf(file: Path, reference, arch: str, kind="F32") -> Path:
    """A model of transformers as a GGUF file. kind: of its matrices, if MXFP4 of its experts only."""
    config, state = reference.config, dict(reference.state_dict())
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys = config.to_dict() | {
        "rope_theta": rope["rope_theta"],
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    if arch == "gemma3":  # llama.cpp adds the 1 of zero-centred norms
        state = {n: t + 1 if n.endswith("norm.weight") else t for n, t in state.items()}
        for theirs, ours in GEMMA_NORMS.items():
            state = {n.replace(theirs, ours): t for n, t in state.items()}
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:  # transformers 5 holds them stacked: gate above up
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}.mlp.experts."
            stacks = {n.removeprefix(prefix): state.pop(n) for n in [*state] if n.startswith(prefix)}
            state |= {f"model.layers.{i}.ffn_{n}": t for n, t in gguf_experts(stacks).items()}
    if arch == "gpt-oss":
        state = {n.replace("post_attention_layernorm", "post_attention_norm"): t for n, t in state.items()}

    def extra(w) -> None:
        if arch == "gpt-oss":
            w.add_expert_feed_forward_length(config.intermediate_size)
        if arch in ("gemma3", "phi3", "gpt-oss"):
            w.add_sliding_window(config.sliding_window)
        if arch == "gemma3":
            w.add_sliding_window_pattern(GEMMA3["sliding_window_pattern"])
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(rope["factor"])
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "short_factor" in rope:
            for kind in ("short", "long"):
                w.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            w.add_rope_scaling_attn_factors((1 + math.log(2) / math.log(256)) ** 0.5)
        if experts:
            w.add_expert_count(experts)
            w.add_expert_used_count(config.num_experts_per_tok)
            if arch == "qwen3moe":
                w.add_expert_feed_forward_length(config.moe_intermediate_size)

    return write_gguf(file, state, keys, kind, extra, arch)


@pytest.mark.parametrize("name,arch", [
    ("Llama-3", "llama"), ("Qwen2", "qwen2"), ("Qwen2.5 tied", "qwen2"), ("Qwen3", "qwen3"),
    ("Mixtral", "llama"), ("Qwen3-MoE", "qwen3moe"), ("Phi-3", "phi3"), ("Phi-3 with longrope", "phi3"),
    ("Gemma 3", "gemma3"), ("Qwen3 tied, yarn", "qwen3"), ("gpt-oss", "gpt-oss"),
])
def test_gguf_gives_the_same_tensors(tmp_path, name, arch):
    reference = make_target(tmp_path / "in", name)
    a = convert(tmp_path / "in", tmp_path / "a", quiet=True)
    b = convert(family_gguf(tmp_path / "m.gguf", reference, arch), tmp_path / "b", quiet=True)
    x, y = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert x.keys() == y.keys()
    for k in x:  # 1 is added and taken away
        torch.testing.assert_close(x[k], y[k], rtol=0, atol=2e-7 if arch == "gemma3" and "norm" in k else 0)
    same = (
        "num_layers", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope_base", "qkv_bias", "qk_norm",
        "num_experts", "experts_per_token", "intermediate_size", "tie_embeddings", "windows",
        "local_rope_base", "activation", "zero_centred", "output_norms", "scaled_embedding", "max_seq_len",
        "sinks", "biases",
    )
    one, two = read_config(a), read_config(b)
    for config in (one, two):
        if rope := config["rope_scaling"]:  # float32 in a GGUF
            keys = "attention_factor", "factor", "original_max_position_embeddings"
            factors = (rope.get(key) or 1 for key in keys)
            config["numbers"] = [*rope.get("divisors", ()), *rope.get("long_divisors", ()), *factors]
    assert one.get("numbers") == pytest.approx(two.get("numbers"))
    assert [one.get(k) for k in same] == [two.get(k) for k in same]


def test_a_gguf_keeps_experts_in_mxfp4(tmp_path):
    reference = make_target(tmp_path / "in", "gpt-oss in MXFP4")
    file = family_gguf(tmp_path / "m.gguf", reference, "gpt-oss", kind="MXFP4")
    target, config = load_model(convert(file, tmp_path / "out", quiet=True))
    assert config["quantization"] == {"mode": None, "group": 0, "lm_head": None, "experts": "mxfp4"}
    assert config["rope_scaling"]["truncate"] is False
    tokens = torch.randint(0, V, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(target.causal(tokens)[0])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("length, rope, longest", [
    (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
    (16384, {"rope_type": "linear", "factor": 4.0}, 16384),  # stretched already
    (16384, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 16384}, 65536),
    (16384, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
    (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
])
def test_the_context_grows_with_the_scaling_unless_it_has_grown(length, rope, longest):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 64)
    config = sizes | {"num_attention_heads": 4, "max_position_embeddings": length, "rope_scaling": rope}
    assert model_fields(Path("x"), config)["max_seq_len"] == longest
