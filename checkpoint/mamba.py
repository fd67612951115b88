"""Configs and tensors of Granite 4 with Mamba-2 layers, as published."""
from __future__ import annotations

import math
from pathlib import Path

import torch

from checkpoint.dense import RecordedConfig
from checkpoint.source import Entry
from common.errors import InputError

EXPECTED = {  # supported values; transformers 5 writes infinity as an object
    "mamba_conv_bias": (True,), "mamba_proj_bias": (False,),
    "time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
}


def mamba_fields(path: Path, config: RecordedConfig) -> tuple[dict, dict]:
    """Return the config for `checkpoint.configs.model_fields`, and further fields. Raises InputError."""
    config.setdefault("position_embedding_type", "none")  # a missing key means NoPE, as null does
    types = config.get("layer_types") or ["attention"] * (config.get("num_hidden_layers") or 0)
    layers = [int(name in ("mamba", "linear_attention")) for name in types]
    if not any(layers):
        config.read.update(key for key in config if key.startswith(("mamba_", "time_step")))
        return config, {}
    if {*types} - {"mamba", "linear_attention", "attention", "full_attention"} or all(layers):
        raise InputError(f"{path}: layer_types { {*types} }; expected mamba and attention")
    for key, expected in EXPECTED.items():
        if (value := config.get(key, expected[0])) not in expected:
            raise InputError(f"{path}: {key} {value} is not supported; expected {expected[0]}")
    heads = config.get("mamba_n_heads", 128)
    width = config.get("mamba_expand", 2) * config.get("hidden_size", 0)
    size = width // heads if heads and width % heads == 0 else 0
    if not size or config.get("mamba_d_head", "auto") not in ("auto", None, size):
        raise InputError(f"{path}: mamba_n_heads {heads} and mamba_d_head {config.get('mamba_d_head')} do not"
                         f" match mamba_expand * hidden_size, {width}")
    fields = {
        "mamba": True, "delta_layers": layers, "delta_heads": heads, "delta_value_dim": size,
        "delta_key_heads": config.get("mamba_n_groups", 1), "delta_key_dim": config.get("mamba_d_state", 256),
        "delta_taps": config.get("mamba_d_conv", 4),
    }
    return config | {"layer_types": None}, fields


def in_our_order(path: Path, fields: dict, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with rows in the order of a DeltaNet layer: C, B, x, gate, steps.

    The published order is gate, x, B, C, steps.
    """
    if not fields.get("mamba"):
        return tensors
    values = fields["delta_heads"] * fields["delta_value_dim"]
    sizes = values, values, *[fields["delta_key_heads"] * fields["delta_key_dim"]] * 2, fields["delta_heads"]
    z, x, b, c, steps = torch.arange(sum(sizes)).split(sizes)
    orders = {"in_proj.weight": torch.cat((c, b, x, z, steps))}
    orders |= dict.fromkeys(("conv1d.weight", "conv1d.bias"), torch.cat((c, b, x)) - values)

    def reorder(name: str, tensor: Entry) -> Entry:
        order = orders.get(name.partition(".mamba.")[2])
        return tensor if order is None or tensor.shape[0] != len(order) else tensor.rows(order)

    return {name: reorder(name, tensor) for name, tensor in tensors.items()}
