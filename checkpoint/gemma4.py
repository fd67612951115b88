"""Configs and tensors of Gemma 4, as published. Source: transformers' modeling file."""
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint.dense import rope_of
from checkpoint.source import Entry
from common.errors import InputError

ROPE = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return the config without the keys read here, and fields of ModelArgs. Raises InputError."""
    layers, rope = config.get("num_hidden_layers") or 0, rope_of(config) or ROPE
    layer_types = list(config.get("layer_types") or (
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)))
    if layer_types:
        layer_types[-1] = "full_attention"
    full = rope.get("full_attention") or {}
    if full.get("rope_type") not in ("proportional", "default", None) or full.get("factor", 1) != 1:
        raise InputError(f"{path}: RoPE {full} of full_attention is not supported; expected proportional")
    by_layer = config.get("per_layer_config") or {}  # transformers 5 writes it in place of the next two keys
    of_global = by_layer.get(str(layer_types.index("full_attention")), {}) if layer_types else {}
    heads, shared = config.get("num_global_key_value_heads"), bool(config.get("attention_k_eq_v"))
    size = of_global.get("head_dim", config.get("global_head_dim", 512))
    fields = {
        "global_head_dim": size, "shared_kv_layers": config.get("num_kv_shared_layers", 0),
        "global_kv_heads": of_global.get("num_key_value_heads") or (shared and heads)
        or config.get("num_key_value_heads"),
        "global_pairs": int(full.get("partial_rotary_factor", 1) * size // 2), "value_is_key": shared,
        "wide_mlp": bool(config.get("use_double_wide_mlp")),
        "layer_input_size": config.get("hidden_size_per_layer_input", 0),
    }
    if config.get("enable_moe_block"):
        fields |= {ours: config.get(theirs, 0) for ours, theirs in (
            ("num_experts", "num_experts"), ("experts_per_token", "top_k_experts"),
            ("intermediate_size", "moe_intermediate_size"), ("dense_size", "intermediate_size"))}
    if fields["layer_input_size"] and config.get("vocab_size_per_layer_input", 0) not in (
            0, config.get("vocab_size")):
        raise InputError(f"{path}: vocab_size_per_layer_input other than vocab_size is not supported")
    sliding = rope.get("sliding_attention") or {}
    bases = {name: {"rope_theta": rope.get("rope_theta")} for name, rope in (
        ("full_attention", full), ("sliding_attention", sliding))}
    return config | {"layer_types": layer_types, "rope_parameters": bases}, fields


def without_unused(path: Path, fields: dict, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Drop the keys and values of layers that share those of an earlier layer."""
    own = fields["num_layers"] - fields["shared_kv_layers"]
    parts = {n: re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_\w+\.weight", n) for n in tensors}
    return {name: tensors[name] for name, part in parts.items() if not part or int(part[1]) < own}


def from_gguf(path: Path, config: dict, get: Callable, tensors: dict, divisors: dict) -> dict:
    """Convert GGUF metadata to keys of a published config. get(key): a value of the metadata."""
    layer_types, kv_heads = config["layer_types"], config["num_key_value_heads"]
    local, full = map(layer_types.index, ("sliding_attention", "full_attention"))
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * len(layer_types)
    sizes = config["intermediate_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes]
    values = divisors["divisors"].dequantize() if divisors else torch.ones(1)  # 1: rotated, 1e30: not
    size, rotated = get("attention.key_length_swa"), values == 1
    swa = get("rope.dimension_count_swa", size), get("attention.value_length_swa", size)
    if {*swa} != {size} or bool((~rotated & (values < 1e20)).any()):
        raise InputError(f"{path}: partial RoPE of local heads, or other divisors, are not supported")
    of_global = {"head_dim": config["head_dim"], "num_key_value_heads": kv_heads[full]}
    return {
        "head_dim": size, "num_key_value_heads": kv_heads[local], "per_layer_config": {str(full): of_global},
        "intermediate_size": min(sizes), "use_double_wide_mlp": max(sizes) > min(sizes),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "enable_moe_block": bool(config.get("num_experts")),
        "top_k_experts": config.get("num_experts_per_tok"), "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": config.get("rope_local_base_freq")},
            "full_attention": {"rope_type": "proportional", "rope_theta": config.get("rope_theta"),
                               "partial_rotary_factor": rotated.float().mean().item()}},
    }
