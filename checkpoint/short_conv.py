"""Configs of LFM2 and LFM2.5 as published, dense and MoE. Source: transformers' modeling files."""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError


def conv_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return the config for `checkpoint.configs.model_fields`, and further fields. Raises InputError."""
    layers, full = config.get("num_hidden_layers") or 0, config.get("full_attn_idxs")
    layer_types = config.get("layer_types") or [
        "full_attention" if full is None or i in full else "conv" for i in range(layers)]
    if {*layer_types} - {"full_attention", "conv"} or "full_attention" not in layer_types:
        raise InputError(f"{path}: layer_types { {*layer_types} }; expected conv and full_attention")
    # Read even if unused, see `reject_unread`.
    size, multiple = config.get("intermediate_size") or 0, config.get("block_multiple_of", 256)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if config.get("block_auto_adjust_ff_dim", True):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    fields = {
        "conv_layers": [int(name == "conv") for name in layer_types],
        "conv_taps": config.get("conv_L_cache", 3), "conv_bias": bool(config.get("conv_bias")),
        "intermediate_size": size, "qk_norm": True,
    }
    if config.get("num_experts"):
        fields |= {"dense_layers": config.get("num_dense_layers", 2), "dense_size": size,
                   "router_factor": config.get("routed_scaling_factor", 1.0)}
    return config | {"layer_types": None}, fields
