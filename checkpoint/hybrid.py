"""Configs and tensors of Qwen3-Next, Qwen3.5 and later, as published: Gated DeltaNet and gated attention.

Sources: transformers' modeling files, llama.cpp's conversion/qwen.py.
"""
from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.dense import STACKS
from checkpoint.rotary import each_head, rotary_first
from checkpoint.source import Entry
from common.errors import InputError
from model import ModelArgs

DELTA = {  # config keys -> fields of ModelArgs, and transformers' defaults
    "linear_num_value_heads": ("delta_heads", 32), "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_key_head_dim": ("delta_key_dim", 128), "linear_value_head_dim": ("delta_value_dim", 128),
    "linear_conv_kernel_dim": ("delta_taps", 4), "shared_expert_intermediate_size": ("shared_expert_size", 0),
}
EXPECTED = {  # other keys, and their supported values
    "attn_output_gate": (True,), "mtp_use_dedicated_embeddings": (False,),
    "output_gate_type": ("swish", "silu"),
}


def delta_rows(a: ModelArgs) -> tuple[int, ...]:
    """Return the rows of q, k and v together, z, b and a of a Gated DeltaNet layer."""
    return a.delta_width, a.delta_heads * a.delta_value_dim, a.delta_heads, a.delta_heads


DELTA_STACKS = STACKS | {"w_in.": delta_rows}


def hybrid_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return the config without the keys read here, and fields of ModelArgs.

    Raises InputError on values that are not supported.
    """
    for key, expected in EXPECTED.items():
        if config.get(key) not in (None, *expected):
            raise InputError(f"{path}: {key} {config[key]!r} is not supported for this model")
    fields = {field: config.get(key, default) for key, (field, default) in DELTA.items()}
    layers, types = config.get("num_hidden_layers") or 0, config.get("layer_types")
    period = config.get("full_attention_interval", 4)  # read even if unused, see `reject_unread`
    if types is None:
        types = ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(layers)]
    if {*types} != {"full_attention", "linear_attention"} or len(types) != layers:
        raise InputError(f"{path}: layer_types must be linear_attention or full_attention for each of"
                         f" {layers} layers; both are needed")
    fields["delta_layers"] = [int(name == "linear_attention") for name in types]
    return config | {"layer_types": None}, fields


def rearranged(path: Path, fields: dict, tensors: dict[str, Entry], tiled: bool) -> dict[str, Entry]:
    """Return the tensors of a model under the names of Qwen3.5, with q split from its gate; see `_orders`.

    path: for errors. fields: of ModelArgs. tiled: value heads are tiled over key heads (GGUF).
    Raises InputError if a tensor has another number of rows.
    """
    orders, result = _orders(path, fields, tiled), {}
    for name, entry in tensors.items():
        stem, last = re.fullmatch(r"(.*?)((?:linear|self)_attn\..*)?", name, re.DOTALL).groups()
        if last == "linear_attn.out_proj.weight" and tiled:
            entry = entry.columns(orders["linear_attn.in_proj_z.weight"]["in_proj_z.weight"])
        if last not in orders:
            result[name] = entry
            continue
        if entry.shape[0] != (rows := sum(map(len, orders[last].values()))):
            raise InputError(f"{path}: tensor {name} {list(entry.shape)}: expected {rows} rows")
        for new, order in orders[last].items():
            result[f"{stem}{last.partition('.')[0]}.{new}"] = entry.rows(order)
    return result


def _orders(path: Path, fields: dict, tiled: bool) -> dict[str, dict[str, Tensor]]:
    """Map each source tensor to the row indices of our tensors: source name -> {our name: row indices}."""
    size, rotary = fields["head_dim"], fields.get("rotary_dim") or fields["head_dim"]
    keys, values = fields["delta_key_heads"], fields["delta_heads"]
    key_dim, value_dim = fields["delta_key_dim"], fields["delta_value_dim"]
    if not keys or values % keys:
        raise InputError(f"{path}: {values} value heads are not a multiple of {keys} key heads")

    rotary_order, unchanged = rotary_first(size, rotary), torch.arange(size)
    # Files interleave each key head with its value heads.
    sizes = key_dim, key_dim, values // keys * value_dim, values // keys * value_dim
    q, k, v, z = (each_head(keys, sum(sizes), rows) for rows in torch.arange(sum(sizes)).split(sizes))
    b, a = (each_head(keys, 2 * values // keys, rows) for rows in torch.arange(2 * values // keys).chunk(2))
    orders = {
        "self_attn.q_proj.weight": {
            "q_proj.weight": each_head(fields["num_heads"], 2 * size, rotary_order),
            "gate_proj.weight": each_head(fields["num_heads"], 2 * size, size + unchanged)},
        "self_attn.k_proj.weight": {"k_proj.weight": each_head(fields["num_kv_heads"], size, rotary_order)},
        **{f"self_attn.{x}_norm.weight": {f"{x}_norm.weight": rotary_order} for x in "qk"},
        "linear_attn.in_proj_qkvz.weight": {
            "in_proj_qkv.weight": torch.cat((q, k, v)), "in_proj_z.weight": z},
        "linear_attn.in_proj_ba.weight": {"in_proj_b.weight": b, "in_proj_a.weight": a},
    }
    if not tiled:
        return orders
    # Move each value head next to its key head.
    heads = torch.arange(values).view(-1, keys).T.flatten()
    rows = (heads[:, None] * value_dim + torch.arange(value_dim)).flatten()
    qkv = torch.cat((torch.arange(2 * keys * key_dim), 2 * keys * key_dim + rows))
    untiled = dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), heads) | {
        "in_proj_z.weight": rows, "in_proj_qkv.weight": qkv, "conv1d.weight": qkv}
    return orders | {f"linear_attn.{name}": {name: order} for name, order in untiled.items()}
