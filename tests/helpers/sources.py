"""Tiny checkpoints in the layouts of Hugging Face and llama.cpp, and the command that converts them."""
import json
import re
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from checkpoint.gguf import HEADS, TABLES
from convert_checkpoint import main
from helpers.heads import layer_shapes, make_head

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 96,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "eos_token_id": [3, 5], "bos_token_id": 1, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
HEAD_CONFIG = {
    **CONFIG, "num_hidden_layers": 1, "draft_vocab_size": 24, "rope_theta": None, "head_dim": None,
    "architectures": ["LlamaForCausalLMEagle3"],
}


def run(capsys, *argv) -> tuple[int, list[str]]:
    """Run convert_checkpoint.py; return (exit status, lines of stderr)."""
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err.splitlines()


def target_state(config=CONFIG, dtype=torch.float32, seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    H, V, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    heads = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    for p in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        shapes |= {p + "input_layernorm.weight": (H,)} | layer_shapes(p, H, inner, heads)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, H)
    return {name: torch.randn(shape, generator=g).mul(0.2).to(dtype) for name, shape in shapes.items()}


def head_state(hidden=32) -> dict[str, torch.Tensor]:
    """Return the tensors of an EAGLE-3 head for the target."""
    return make_head("eagle3", vocab=96, draft=24, hidden=hidden, target=hidden, hd=8)[0]


def write_source(folder: Path, state: dict, config=CONFIG, form="safetensors") -> Path:
    """Write a Hugging Face folder. form: safetensors or bin; with `-sharded`: four files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    suffix, _, sharded = form.partition("-")
    base, save = {"safetensors": ("model", save_file), "bin": ("pytorch_model", torch.save)}[suffix]
    if not sharded:
        save(state, folder / f"{base}.{suffix}")
        return folder
    parts = {name: 1 + i * 4 // len(state) for i, name in enumerate(state)}
    weight_map = {name: f"{base}-0000{part}-of-00004.{suffix}" for name, part in parts.items()}
    for file in set(weight_map.values()):
        save({n: state[n] for n, f in weight_map.items() if f == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{base}.{suffix}.index.json").write_text(index)
    return folder


NEXTN = {  # GGUF names of an MTP layer's tensors; it is layer 8
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


LEAVES = {"attn_sinks": ".weight", "layer_output_scale": ".weight", "exp_probs_b": ".bias"}


def write_gguf(
    file: Path, state: dict, config=CONFIG, kind="F32", extra=lambda w: None, arch="llama"
) -> Path:
    """Write a file as llama.cpp's converter does: its names and metadata, for LLaMA its interleaved q and k.

    state: by Hugging Face name. kind: GGML type of the matrices. extra(writer) adds other metadata.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    w = gguf.GGUFWriter(file, arch)
    for add, key in {
        w.add_block_count: "num_hidden_layers", w.add_context_length: "max_position_embeddings",
        w.add_embedding_length: "hidden_size", w.add_feed_forward_length: "intermediate_size",
        w.add_head_count: "num_attention_heads", w.add_head_count_kv: "num_key_value_heads",
        w.add_key_length: "head_dim", w.add_value_length: "head_dim",
        w.add_layer_norm_rms_eps: "rms_norm_eps", w.add_rope_freq_base: "rope_theta",
        w.add_sliding_window: "sliding_window", w.add_expert_count: "num_experts",
        w.add_expert_used_count: "num_experts_per_tok",
        w.add_leading_dense_block_count: "num_dense_layers",
        w.add_expert_weights_scale: "routed_scaling_factor", w.add_shortconv_l_cache: "conv_L_cache",
        w.add_expert_feed_forward_length: "moe_intermediate_size",
        w.add_expert_shared_feed_forward_length: "shared_expert_intermediate_size",
        w.add_ssm_conv_kernel: "linear_conv_kernel_dim", w.add_ssm_state_size: "linear_key_head_dim",
        w.add_embedding_scale: "embedding_multiplier", w.add_residual_scale: "residual_multiplier",
        w.add_attention_scale: "attention_multiplier", w.add_logit_scale: "logits_scaling",
        w.add_attn_logit_softcapping: "attn_logit_softcapping",
        w.add_final_logit_softcapping: "final_logit_softcapping",
        w.add_ssm_group_count: "linear_num_key_heads", w.add_ssm_time_step_rank: "linear_num_value_heads",
    }.items():
        if config.get(key):
            add(config[key])
    w.add_bos_token_id(1), w.add_eos_token_id(3), w.add_eot_token_id(5)
    extra(w)
    qtype = gguf.GGMLQuantizationType[kind]
    layers = HEADS[arch].family if arch in HEADS else arch
    known = gguf.get_tensor_name_map(next(x for x, n in gguf.MODEL_ARCH_NAMES.items() if n == layers), 9)
    for name, tensor in state.items():
        if nextn := re.fullmatch(r"mtp\.(\w+)\.weight", name):
            name = f"blk.8.nextn.{NEXTN[nextn[1]]}.weight"
        else:
            name = name.replace("mtp.layers.0.", "model.layers.8.").replace("dt_bias", "dt_proj.bias")
            gguf_name = known.get_name(name, try_suffixes=(".weight", ".bias"))
            name = gguf_name or name.replace("model.layers", "blk")
            name += LEAVES.get(name.rpartition(".")[2], "")
        data = tensor.float()
        if arch in TABLES["interleaved"] and re.search(r"attn_[qk]\.", name):  # halves become pairs
            pairs = data.view(-1, 2, config["head_dim"] // 2, data.shape[-1]).transpose(1, 2)
            data = pairs.reshape(data.shape)
        data = data.contiguous().numpy() if tensor.is_floating_point() else tensor.numpy()
        dense = data.ndim == 1 or kind == "F32" or data.shape[-1] % 32
        if dense or (kind == "MXFP4" and not name.endswith("_exps.weight")):
            w.add_tensor(name, data)
        else:
            w.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file
