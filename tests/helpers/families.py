"""Tiny random targets of every family, written by transformers in its own layout."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

V, H, LAYERS = 128, 48, 8
SIZES = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_OPTIONS = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# name: (transformers' classes, what differs, how it is stored)
TARGETS = {
    "Llama-2": ("Llama", {"rope_parameters": ROPE, "num_key_value_heads": 4}, "sharded"),
    "Vicuna": ("Llama", {"rope_parameters": ROPE, "num_key_value_heads": 4}, "bin"),
    "Llama-3": ("Llama", {"rope_parameters": {**ROPE, "rope_theta": 5e5}}, "one file"),
    "Llama-3.1": ("Llama", {"rope_parameters": LLAMA3}, "sharded"),
    "Llama-3.2": (
        "Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}, "one file"
    ),
    "linear RoPE": (
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, "one file"
    ),
    "yarn RoPE": ("Llama", {"rope_parameters": YARN}, "one file"),
    "yarn RoPE with its options": (
        "Llama", {"rope_parameters": YARN | YARN_OPTIONS}, "one file"
    ),
    "Mistral": ("Mistral", {"rope_parameters": ROPE, "sliding_window": None}, "sharded"),
    "Qwen2": ("Qwen2", {"rope_parameters": ROPE}, "sharded"),
    "Qwen2.5 tied": ("Qwen2", {"rope_parameters": ROPE, "tie_word_embeddings": True}, "one file"),
    "Qwen3": ("Qwen3", {"rope_parameters": ROPE, "head_dim": 20}, "sharded"),
    "Qwen3 tied, yarn": (
        "Qwen3", {"rope_parameters": YARN, "head_dim": 20, "tie_word_embeddings": True}, "one file"
    ),
    "Mixtral": (
        "Mixtral", {"rope_parameters": ROPE, "num_local_experts": 5, "num_experts_per_tok": 2}, "sharded"
    ),
    "Qwen3-MoE": (
        "Qwen3Moe", {"rope_parameters": ROPE, "head_dim": 20, "norm_topk_prob": True, **EXPERTS}, "sharded"
    ),
    "Qwen3-MoE, not renormalised": (
        "Qwen3Moe", {"rope_parameters": ROPE, "head_dim": 20, "norm_topk_prob": False, **EXPERTS}, "one file"
    ),
}


def make_target(folder: Path, name: str):
    """Write the named model as its publishers do -> the model of transformers."""
    transformers = pytest.importorskip("transformers")
    kind, changes, form = TARGETS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(sorted(TARGETS).index(name))
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for n, p in reference.named_parameters():  # norms and biases too: ones and zeros would hide a swap
            p.normal_(1 if n.endswith("norm.weight") else 0, 0.2)
    reference.save_pretrained(folder, max_shard_size="60KB" if form == "sharded" else "1GB")
    if form == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 1
    if form == "bin":
        file = folder / "model.safetensors"
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
    return reference
