"""Tiny random targets with gated delta nets, written by transformers, some with an MTP layer."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.families import EXPERTS, LAYERS, SIZES, H, V

DELTA = {
    "head_dim": 20, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
}
MIXTURE = EXPERTS | {"shared_expert_intermediate_size": 24}
# Sizes that groups of 32 divide, and 64 between two ranks.
WIDE = {
    "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "linear_value_head_dim": 16,
    "linear_num_value_heads": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}
EYES = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": H,
    "num_position_embeddings": 4,
}
# name: (transformers' config and model, changes, where its layers are)
HYBRIDS = {
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}, "model."),
    "Qwen3.5 with eyes": (
        "Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {"vision_config": EYES}, "model.language_model."),
    "Qwen3.5, yarn": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"rope_parameters": {
        **DELTA["rope_parameters"], "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 64}}, "model."),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", MIXTURE, "model."),
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", MIXTURE, "model."),
}


def make_hybrid(folder: Path, name: str, mtp: bool = False, wide: bool = False, layers: int = LAYERS):
    """Write the named model as its publishers do -> the model of transformers.

    mtp: with an MTP layer. wide: of `WIDE` sizes. layers: every fourth has attention.
    """
    transformers = pytest.importorskip("transformers")
    config, model, changes, prefix = HYBRIDS[name]
    sizes = {**SIZES, **DELTA, "vocab_size": V, "num_hidden_layers": layers}
    sizes = {"text_config": sizes, **changes} if "eyes" in name else sizes | changes
    if wide:
        sizes |= WIDE
    if name == "Qwen3.5-MoE":  # whose config has none
        del sizes["intermediate_size"]
    torch.manual_seed(sorted(HYBRIDS).index(name))
    reference = getattr(transformers, model)(getattr(transformers, config)(**sizes)).float().eval()
    with torch.no_grad():
        for n, p in reference.named_parameters():  # states decay slowly: a wrong one is to be seen
            mean = {"norm.weight": 1, "A_log": -3}.get(n.partition("linear_attn.")[2], 0)
            p.normal_(mean, 0.2)
    reference.save_pretrained(folder)
    if mtp:
        file = folder / "model.safetensors"
        state = load_file(file)
        save_file(state | mtp_layer(state, prefix), file, metadata={"format": "pt"})
    return reference


def mtp_layer(state: dict, prefix: str) -> dict:
    """A random MTP layer, whose attention and MLP are like those of a target's fourth layer."""
    g = torch.Generator().manual_seed(1)
    theirs = f"{prefix}layers.3."
    layer = {f"mtp.layers.0.{n.removeprefix(theirs)}": t + 0.05 * torch.randn(t.shape, generator=g)
             for n, t in state.items() if n.startswith(theirs)}
    H = len(layer["mtp.layers.0.input_layernorm.weight"])
    shapes = {"fc": (H, 2 * H), "norm": (H,), "pre_fc_norm_embedding": (H,), "pre_fc_norm_hidden": (H,)}
    return layer | {
        f"mtp.{n}.weight": 0.2 * torch.randn(shape, generator=g) for n, shape in shapes.items()
    }
