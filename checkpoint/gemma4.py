"""Configs and tensors of Gemma 4, as published. Source: transformers' modeling file."""
from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch

from checkpoint.dense import NameTable
from checkpoint.source import Entry
from common.errors import InputError

LAYER: NameTable = {
    "wqkv.weight": ["self_attn.qkv_proj.weight"],  # `joined` makes it
    "layer_scalar": ["layer_scalar"],
    "w_input_gate.weight": ["per_layer_input_gate.weight"],
    "w_input_out.weight": ["per_layer_projection.weight"],
    "input_norm.weight": ["post_per_layer_input_norm.weight"],
}
NAMES: NameTable = {
    "embed_inputs.weight": ["model.embed_tokens_per_layer.weight"],
    "w_inputs.weight": ["model.per_layer_model_projection.weight"],
    "inputs_norm.weight": ["model.per_layer_projection_norm.weight"],
}
ROPE = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return the config without the keys read here, and fields of ModelArgs. Raises InputError."""
    layers, rope = config.get("num_hidden_layers") or 0, config.get("rope_parameters") or ROPE
    kinds = list(config.get("layer_types") or (
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)))
    if kinds:
        kinds[-1] = "full_attention"
    full = rope.get("full_attention") or {}
    if full.get("rope_type") not in ("proportional", "default", None) or full.get("factor", 1) != 1:
        raise InputError(f"{path}: RoPE {full} of full_attention is not supported; expected proportional")
    of_layers = config.get("per_layer_config") or {}  # transformers 5 writes it in place of the next two keys
    of_global = of_layers.get(str(kinds.index("full_attention")), {}) if kinds else {}
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
    if fields["layer_input_size"] and config.get("vocab_size_per_layer_input", 0) not in (
            0, config.get("vocab_size")):
        raise InputError(f"{path}: vocab_size_per_layer_input other than vocab_size is not supported")
    sliding = rope.get("sliding_attention") or {}
    plain = {kind: {"rope_theta": one.get("rope_theta")} for kind, one in (
        ("full_attention", full), ("sliding_attention", sliding))}
    return config | {"layer_types": kinds, "rope_parameters": plain}, fields


def joined(path: Path, fields: dict, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with q, k and v of each layer in one, and without keys that layers do not use."""
    found, own = {}, fields["num_layers"] - fields["shared_kv_layers"]
    for name, entry in tensors.items():
        part = re.fullmatch(r"(model\.layers\.(\d+)\.self_attn\.)([qkv])_(proj|norm)\.weight", name)
        if not part or (part[4] == "norm" and (part[3] == "q" or int(part[2]) < own)):
            found[name] = entry
        elif part[3] == "q":
            others = (tensors.get(f"{part[1]}{x}_proj.weight") for x in "kv" if int(part[2]) < own)
            parts = [entry, *(one for one in others if one)]
            rows = sum(one.shape[0] for one in parts)
            read = partial(lambda parts: torch.cat([x.read() for x in parts]), parts)
            found[f"{part[1]}qkv_proj.weight"] = Entry((rows, *entry.shape[1:]), entry.dtype, read)
    return found
