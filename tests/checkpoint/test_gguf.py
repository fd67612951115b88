"""GGUF files as llama.cpp's converter writes them convert to the same folder as the Hugging Face source."""
import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers.blocks import published
from helpers.families import HYBRIDS, LAYERS, TARGETS, H, V, make_target
from helpers.heads import write_head
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_gguf
from safetensors.torch import load_file

from checkpoint import gguf as gguf_source
from checkpoint.convert import convert
from checkpoint.load import load_model, read_config
from families.mixed import causal


def test_quantized(tmp_path, target, monkeypatch):
    """A file in two parts; a rope factor without a type means linear scaling, as in llama.cpp."""
    # One head per block, so that tensors are read in several blocks.
    monkeypatch.setattr(gguf_source, "BLOCK_BYTES", 4 * 16 * 32)
    state, files = target_state(), [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]

    for i, file in enumerate(files):
        def extra(w, i=i) -> None:
            w.add_rope_scaling_factor(4.0), w.add_uint16("split.count", 2), w.add_uint16("split.no", i)
            w.add_int32("split.tensors.count", len(state))

        part = {n: t for n, t in state.items() if ("layers.5" in n) == bool(i)}
        write_gguf(file, part, kind="Q8_0", extra=extra)
    out = convert(files[0], tmp_path / "out", dtype="bf16", quiet=True)
    written = read_config(out)
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and written["max_seq_len"] == 512
    state, exact = (load_file(folder / "model.safetensors") for folder in (out, target))
    assert state.keys() == exact.keys()
    for name, tensor in exact.items():
        assert state[name].dtype == torch.bfloat16
        # Q8_0: half a step of max|block|/127, then bf16's 8 bits.
        bound = tensor.abs().max() * (1 / 254 + 1 / 256)
        assert (state[name].float() - tensor).abs().max() < bound, name


def gguf_experts(stacks: dict, arch: str) -> dict:
    """Return a layer's experts as GGUF stores them, from transformers' gate_up_proj, down_proj and biases."""
    gate_up, down = stacks["gate_up_proj"], stacks["down_proj"]
    if arch == "gemma4":
        return {"gate_up_exps.weight": gate_up, "down_exps.weight": down}
    if "down_proj_bias" not in stacks:  # gate above up
        gate, up = gate_up.chunk(2, dim=1)
        return {"gate_exps.weight": gate, "up_exps.weight": up, "down_exps.weight": down}
    gate_up, bias = gate_up.transpose(1, 2), stacks["gate_up_proj_bias"]  # gpt-oss: in turn
    return {
        "gate_exps.weight": gate_up[:, ::2], "up_exps.weight": gate_up[:, 1::2],
        "down_exps.weight": down.transpose(1, 2), "gate_exps.bias": bias[:, ::2],
        "up_exps.bias": bias[:, 1::2], "down_exps.bias": stacks["down_proj_bias"],
    }


def gemma4_keys(config) -> dict:
    """Return Gemma 4's GGUF keys: head counts and sizes describe global layers, others are lists by layer."""
    of_global = next(iter(config.to_dict()["per_layer_config"].values()))
    heads = [2 if kind == "sliding_attention" else of_global.get("num_key_value_heads", 2)
             for kind in config.layer_types]
    own = LAYERS - config.num_kv_shared_layers
    return {
        "head_dim": 20, "num_key_value_heads": heads if {*heads} != {2} else 2,
        "num_experts_per_tok": config.top_k_experts,
        "intermediate_size": [80] * own + [160] * (LAYERS - own) if config.use_double_wide_mlp else 80}


def family_gguf(file: Path, reference, arch: str, kind="F32") -> Path:
    """Write a transformers model as a GGUF file. kind: the type of its matrices (MXFP4: of its experts only).
    """
    config, state = reference.config.get_text_config(), {
        n.replace("language_model.", ""): t for n, t in reference.state_dict().items()
        if not re.search("vision|visual|audio|projector", n)}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    keys = config.to_dict()
    keys |= {
        "rope_theta": rope["rope_theta"], "num_experts": experts,
        "head_dim": keys.get("head_dim") or config.hidden_size // config.num_attention_heads,
    }
    if arch == "gpt-oss":
        keys["moe_intermediate_size"] = config.intermediate_size
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    if arch in ("gemma2", "gemma3"):  # llama.cpp adds the 1 of zero-centered norms
        state = {n: t + 1 if n.endswith("norm.weight") else t for n, t in state.items()}
    kinds = getattr(config, "layer_types", None)
    if arch == "gemma4":
        keys |= gemma4_keys(config)
        state = {n.replace("router.scale", "ffn_gate_inp.scale").replace(
            "router.per_expert_scale", "ffn_down_exps.scale"): t for n, t in state.items()}
    for n in [n for n in state if "shared_mlp" in n]:  # of Granite 4
        parts = state.pop(n).chunk(2) if "input" in n else [state.pop(n)]
        names = ("gate", "up") if "input" in n else ("down",)
        state |= {re.sub(r"shared_mlp\.\w+", f"mlp.{x}_proj", n): t for x, t in zip(names, parts)}
    if arch == "deepseek2":
        for n in [n for n in state if "kv_b_proj" in n]:
            k, v = state.pop(n).unflatten(0, (4, -1)).split((12, 20), dim=1)
            state |= {n.replace("kv_b", "k_b"): k.transpose(1, 2), n.replace("kv_b", "v_b"): v}
        state = {n.replace("correction_bias", "correction.bias"): t for n, t in state.items()}
        keys |= {"num_key_value_heads": 1, "head_dim": 32, "num_dense_layers": 1}
        experts = keys["num_experts"] = config.n_routed_experts
    if arch.startswith("lfm2"):
        keys |= {
            "num_key_value_heads": [2 * (kind == "full_attention") for kind in kinds], "rms_norm_eps": 1e-5,
            "intermediate_size": state["model.layers.0.feed_forward.w1.weight"].shape[0]}
        state = {n: t[:, 0] if n.endswith("conv.conv.weight") else t for n, t in state.items()}
    if experts:  # transformers 5 holds them stacked: gate above up
        for i in range(config.num_hidden_layers):
            prefix = re.compile(rf"model\.layers\.{i}\.(\w+\.)?experts\.")
            stacks = {prefix.sub("", n): state.pop(n) for n in [*state] if prefix.match(n)}
            if stacks:
                state |= {f"model.layers.{i}.ffn_{n}": t for n, t in gguf_experts(stacks, arch).items()}

    def extra(w) -> None:
        if arch == "gemma3":
            w.add_sliding_window_pattern(TARGETS["Gemma 3"][1]["sliding_window_pattern"])
        if arch == "gemma4":
            w.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
            w.add_key_length_swa(12), w.add_value_length_swa(12), w.add_rope_freq_base_swa(1e4)
            w.add_shared_kv_layers(config.num_kv_shared_layers)
            w.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
            w.add_rope_dimension_count(20), w.add_rope_dimension_count_swa(12)
            w.add_tensor("rope_freqs.weight", np.array([1, 1] + [1e30] * 8, np.float32))
        elif "partial_rotary_factor" in rope:
            w.add_rope_dimension_count(int(keys["head_dim"] * rope["partial_rotary_factor"]))
        if "llama_4_scaling_beta" in rope:
            w.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope["rope_type"] in ("linear", "yarn"):
            w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            w.add_rope_scaling_factor(rope["factor"])
        if arch == "deepseek2":
            w.add_q_lora_rank(24), w.add_kv_lora_rank(32), w.add_expert_shared_count(1)
            w.add_key_length_mla(20), w.add_value_length_mla(20), w.add_rope_dimension_count(8)
        if arch == "olmo2" and kinds:
            w.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
            w.add_rope_scaling_yarn_attn_factor(1.25)
        if "original_max_position_embeddings" in rope:
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "short_factor" in rope:
            for kind in ("short", "long"):
                w.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
            w.add_rope_scaling_attn_factors((1 + math.log(2) / math.log(256)) ** 0.5)

    return write_gguf(file, state, keys, kind, extra, arch)


def hybrid_gguf(file: Path, state: dict, config, arch: str) -> Path:
    """Write a model with Gated DeltaNet layers as a GGUF file. state: the whole checkpoint with its MTP
    layer.
    """
    keys, each, size = 2, 3, 12

    def tiled(x: torch.Tensor, rows: int) -> torch.Tensor:
        """Reorder value heads from grouped by key head, as in x, to tiled over the key heads."""
        return x.view(keys, each, rows, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    found: dict[str, torch.Tensor] = {}
    for name, x in state.items():
        last = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
        if re.search(r"norm(_embedding|_hidden)?\.weight$", name) and not last:
            x = x + 1
        if expert := re.fullmatch(r"(.+\.)mlp\.experts\.\d+\.(\w+)_proj\.weight", name):  # in order
            name = f"{expert[1]}ffn_{expert[2]}_exps.weight"
            x = torch.cat((found[name], x[None])) if name in found else x[None]
        if last == "conv1d.weight":
            x = x[:, 0]
        if last == "A_log":
            x = -x.exp()
        if last == "in_proj_qkvz.weight":
            parts = x.view(keys, -1, H).split((8, 8, each * size, each * size), dim=1)
            q, k, v, z = (part.reshape(-1, H) for part in parts)
            found |= {name.replace("qkvz", "qkv"): torch.cat((q, k, v)), name.replace("qkvz", "z"): z}
            continue
        if last == "out_proj.weight" and arch != "qwen3next":
            x = tiled(x.T.contiguous(), size).T
        elif last in ("in_proj_qkv.weight", "conv1d.weight") and arch != "qwen3next":
            x = torch.cat((x[:32], tiled(x[32:].contiguous(), size)))
        elif last not in ("", "norm.weight", "out_proj.weight") and arch != "qwen3next":
            x = tiled(x, size if last == "in_proj_z.weight" else 1)
        found[name] = x

    def extra(w) -> None:
        w.add_nextn_predict_layers(1), w.add_rope_dimension_count(8), w.add_ssm_inner_size(keys * each * size)
        w.add_full_attention_interval(4)

    config = config.to_dict() | {"num_hidden_layers": LAYERS + 1, "rope_theta": 5000.0}
    return write_gguf(file, found, config, "F32", extra, arch)


ROPE = "attention_factor", "factor", "original_max_position_embeddings"
IGNORED = {  # keys that only one of the two sources determines
    "name", "architecture", "source", "sha256", "stop_ids", "bos_id", "query_scalar"}


def comparable(config: dict) -> dict:
    """Return the parts of a config that must be equal, with the numbers of `rope_scaling` as a list."""
    rope = config["rope_scaling"] or {}
    divisors = *rope.get("divisors", ()), *rope.get("long_divisors", ())
    numbers = [*divisors, *(rope.get(key) or 1 for key in ROPE)]
    scaling = rope and (rope["rope_type"], np.float32(numbers).tolist())  # float32 in a GGUF
    return {key: v for key, v in config.items() if key not in IGNORED} | {"rope_scaling": scaling}


@pytest.mark.parametrize("name, arch", [
    ("Llama-3", "llama"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3"),
    ("Mixtral", "llama"), ("Qwen3-MoE", "qwen3moe"), ("Phi-3", "phi3"), ("Phi-3 with longrope", "phi3"),
    ("Phi-4-mini", "phi3"), ("Gemma 2", "gemma2"), ("SmolLM3", "smollm3"), ("OLMo 2", "olmo2"),
    ("LFM2", "lfm2"), ("LFM2-MoE", "lfm2moe"), ("Granite 3", "granite"), ("Granite 4", "granite"),
    ("OLMo 3", "olmo2"), ("Qwen3-VL", "qwen3vl"), ("Qwen3-Omni", "qwen3vlmoe"), ("Mistral Small 3", "llama"),
    ("GLM-4-0414", "glm4"), ("GLM-4.7-Flash", "deepseek2"), ("Qwen2.5-VL", "qwen2vl"),
    *((f"Gemma 4 {size}", "gemma4") for size in ("E2B", "31B", "26B-A4B")), ("Ministral 3", "mistral3"),
    ("Gemma 3", "gemma3"), ("Qwen3 tied, yarn", "qwen3"), ("gpt-oss", "gpt-oss"),
    ("Qwen3.5", "qwen35"), ("Qwen3.5-MoE", "qwen35moe"), ("Qwen3-Next", "qwen3next"),
])
def test_gguf_and_hugging_face_sources_convert_alike(tmp_path, name, arch):
    hybrid = name in HYBRIDS
    reference = make_target(tmp_path / "in", name, mtp=hybrid)
    if hybrid:
        state = load_file(tmp_path / "in" / "model.safetensors")
        file = hybrid_gguf(tmp_path / "m.gguf", state, reference.config, arch)
    else:
        file = family_gguf(tmp_path / "m.gguf", reference, arch)
    sources = {"one": tmp_path / "in", "two": file}
    folders = [convert(source, tmp_path / name, quiet=True) for name, source in sources.items()]
    for part in ("", "mtp") if hybrid else ("",):
        x, y = (load_file(folder / part / "model.safetensors") for folder in folders)
        assert x.keys() == y.keys()
        for n in x:  # norms + 1 - 1 and exp(log(decay)) are rounded
            off = 2e-6 if hybrid else 2e-7 if arch.startswith("gemma") and "norm" in n else 0
            torch.testing.assert_close(x[n], y[n], rtol=0, atol=off, msg=lambda m, n=n: f"{n}: {m}")
        one, two = (comparable(read_config(folder / part)) for folder in folders)
        assert one == two
    assert read_config(folders[1])["stop_ids"] == [3, 5]


@pytest.mark.parametrize("label", ("dflash", "dflash-windows", "dflash2", "eagle3", "eagle3-normed"))
def test_gguf_and_hugging_face_heads_convert_alike(tmp_path, target, label):
    arch, _, variant = label.replace("2", "-2").partition("-")
    tensors, config = published(label, load_model(target)[0]) if arch == "dflash" else (
        head_state(), HEAD_CONFIG | {"head_dim": 8, "rope_theta": 5000.0, "target_hidden_size": 32})
    if variant == "normed":
        tensors["input_norm.weight"] = torch.rand(3 * 32, generator=torch.Generator().manual_seed(0))
        config |= {"norm_before_fc": True, "norm_before_residual": True}
    if variant == "2":  # keys that GGUF lacks
        reads = config["dflash_config"]
        del reads["output_multiplier"], reads["final_logit_softcapping"]
    write_head(tmp_path / "in", tensors, config)

    def extra(w) -> None:
        if "layer_types" in config:
            w.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        if arch == "eagle3":
            w.add_vocab_size(config["vocab_size"]), w.add_array("eagle3.target_layers", [2, 4, 5])
            w.add_uint32("eagle3.target_hidden_size", 32)
            w.add_bool("eagle3.norm_before_residual", variant == "normed")
            return
        if variant == "2":
            w.add_uint32("dflash.selector_top_k", 16), w.add_bool("dflash.attention.causal", False)
        w.add_uint32("dflash.block_size", 5), w.add_array("dflash.target_layers", [1, 3])
        w.add_uint32("tokenizer.ggml.mask_token_id", 3)
        w.add_token_list([str(i) for i in range(config["vocab_size"])])

    names = {"midlayer.hidden_norm": "blk.0.attn_norm_2", "midlayer": "model.layers.0",
             "norm.": "model.norm.", "layers": "model.layers", "hidden_norm": "enc.output_norm",
             "input_norm": "enc.output_norm"}
    state, of_selector = {}, {
        r"candidate_selector.hidden_projection": "selector_hidden", r"candidate_selector\.(\w+)_codebook":
        r"selector_\1.weight", "attention_conv": "attn_conv", "mlp_conv": "ffn_conv",
        r"layers(.+_conv)\.": r"blk\1_", "base_kernel": "base", "kernel_projection": "proj"}
    for name, tensor in tensors.items():
        for found, theirs in of_selector.items():
            name = re.sub(found, theirs, name)
        first = next((one for one in names if name.startswith(one)), "")
        state[names[first] + name[len(first) :] if first else name] = tensor
    if arch == "eagle3":
        state["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))  # ids, not offsets
        del state["t2d"]
    file = write_gguf(tmp_path / "m.gguf", state, config, extra=extra, arch=arch)
    one, two = (convert(source, tmp_path / name, target, quiet=True)
                for name, source in {"one": tmp_path / "in", "two": file}.items())
    x, y = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)
    assert comparable(read_config(one)) == comparable(read_config(two))


def test_mxfp4_experts_are_converted_as_stored(tmp_path):
    reference = make_target(tmp_path / "in", "gpt-oss in MXFP4")
    file = family_gguf(tmp_path / "m.gguf", reference, "gpt-oss", kind="MXFP4")
    target, config = load_model(convert(file, tmp_path / "out", quiet=True))
    assert config["quantization"] == {"mode": None, "group": 0, "lm_head": None, "experts": "mxfp4"}
    assert config["rope_scaling"]["truncate"] is False
    tokens = torch.randint(0, V, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(causal(target, tokens)[0])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
