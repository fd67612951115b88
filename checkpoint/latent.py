"""Configs and tensors of GLM-4.7-Flash, as published. Source: transformers' modeling file."""
from __future__ import annotations

import re
from pathlib import Path

import torch

from checkpoint.dense import STACKS, rope_of, rope_type
from checkpoint.rotary import each_head, rotary_first
from checkpoint.source import Entry
from common.errors import InputError
from model import ModelArgs

MTP = {"eh_proj.weight": "fc.weight", "enorm.weight": "pre_fc_norm_embedding.weight",
       "hnorm.weight": "pre_fc_norm_hidden.weight", "shared_head.norm.weight": "norm.weight"}


def latent_rows(a: ModelArgs) -> tuple[int, ...]:
    """Return the rows of the query vector, and of the key and value vector with the keys' rotary part."""
    return a.query_rank, a.latent_rank + a.rotary_dim


LATENT_STACKS = STACKS | {"wqkv.": latent_rows}


def latent_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return the config for `checkpoint.configs.model_fields`, and further fields. Raises InputError."""
    layers, moe_size = config.get("num_hidden_layers") or 0, config.get("moe_intermediate_size") or 0
    mlp_types = config.get("mlp_layer_types") or ()
    dense = mlp_types.count("dense") if mlp_types else config.get("first_k_dense_replace", 1)
    size = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
    if mlp_types and list(mlp_types) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise InputError(f"{path}: mlp_layer_types {mlp_types}; expected dense layers before sparse ones")
    if config.get("v_head_dim") != size:
        raise InputError(f"{path}: v_head_dim {config.get('v_head_dim')} is not supported; expected"
                         f" qk_nope_head_dim + qk_rope_head_dim, {size}")
    if not config.get("q_lora_rank"):
        raise InputError(f"{path}: a model without q_lora_rank is not supported")
    if (scaling_type := rope_type(rope_of(config))) != "default":
        raise InputError(f"{path}: RoPE of type {scaling_type} is not supported for this model")
    fields = {
        "query_rank": config["q_lora_rank"], "latent_rank": config.get("kv_lora_rank", 0),
        "rotary_dim": config.get("qk_rope_head_dim", 0), "dense_layers": dense,
        "dense_size": config.get("intermediate_size", 0), "num_kv_heads": config.get("num_attention_heads"),
        "shared_expert_size": moe_size * config.get("n_shared_experts", 1),
        "router_factor": config.get("routed_scaling_factor", 1.0),
    }
    return config | {"head_dim": size}, fields


def from_gguf(config: dict, rotary: int) -> dict:
    """Convert GGUF metadata to keys of a published config."""
    return {
        "qk_rope_head_dim": rotary, "qk_nope_head_dim": config["head_dim"] - rotary,
        "v_head_dim": config["head_dim"], "first_k_dense_replace": config.get("num_dense_layers"),
        "partial_rotary_factor": None,
    }


def _join_kv(fields: dict, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Join the projections of keys and values, which GGUF files store separately for each head."""
    joined = {name: entry for name, entry in tensors.items() if not re.search(r"[kv]_b_proj\.weight\[", name)}
    for name in tensors:
        if not name.endswith("k_b_proj.weight[0]"):
            continue
        pattern = name.removesuffix("k_b_proj.weight[0]") + "{}_b_proj.weight[{}]"
        parts = [tuple(tensors[pattern.format(x, head)] for x in "kv") for head in range(fields["num_heads"])]

        def read(parts=parts) -> torch.Tensor:
            return torch.cat([x for k, v in parts for x in (k.read().T, v.read())])

        rows = sum(k.shape[1] + v.shape[0] for k, v in parts)
        joined[name.replace(".k_b_proj.weight[0]", ".kv_b_proj.weight")] = Entry(
            (rows, parts[0][1].shape[1]), parts[0][1].dtype, read)
    return joined


def in_our_order(path: Path, fields: dict, tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors with the MTP layer named as in Qwen and rotary pairs as in `ModelArgs`.

    In files, rotary channels are the last of a head, and pairs are interleaved.
    """
    size, rotary, rank = fields["head_dim"], fields["rotary_dim"], fields["latent_rank"]
    order = torch.arange(size).roll(rotary)[rotary_first(size, rotary, interleaved=True)]
    q = each_head(fields["num_heads"], size, order)
    kv = torch.cat((torch.arange(rank), rank + torch.arange(rotary).view(-1, 2).T.flatten()))
    orders = {"q_b_proj.weight": q, "kv_a_proj_with_mqa.weight": kv}

    def reorder(name: str, entry: Entry) -> Entry:
        if name.endswith("e_score_correction_bias"):  # a shift does not change top-k; bf16 is finer near 0
            return entry.changed(lambda x: x.float() - x.float().mean())
        rows = orders.get(name.rpartition("self_attn.")[2])
        fits = rows is not None and entry.shape[0] == len(rows)  # other shapes are reported later
        return entry.rows(rows) if fits else entry

    mtp, found = f"model.layers.{fields['num_layers']}.", {}
    for name, tensor in _join_kv(fields, tensors).items():
        last = name.removeprefix(mtp)
        if name.startswith(mtp):  # the MTP layer, and copies of the target's matrices
            if last in ("embed_tokens.weight", "shared_head.head.weight"):
                continue
            name = "mtp." + MTP.get(last, f"layers.0.{last}")
        if not name.startswith("blk."):  # the same copies in a GGUF file
            found[name] = reorder(name, tensor)
    return found
