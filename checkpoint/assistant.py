"""Configs and tensors of Gemma 4's assistants, and of other heads with its layers, as published."""
from __future__ import annotations

from dataclasses import replace

import torch

from checkpoint.dense import RecordedConfig, name_table
from checkpoint.families import FAMILIES
from checkpoint.layouts import HeadOptions, ReadHead
from checkpoint.load import check_config
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs

GEMMA4 = FAMILIES["gemma4"]
NAMES = name_table("gemma4_assistant") | {
    name: [source.removeprefix("model.") for source in sources] for name, sources in GEMMA4.names.items()
    if name.startswith("layers.")}
GLOBAL_LAYER = {"attn_norm.weight": ["input_layernorm.weight"]} | name_table("gemma", "gemma4")


def has_gemma4_layers(source: Source) -> bool:
    """Return whether a head (DeepSpec) has Gemma 4's global layers."""
    return "Gemma4" in str(source.config.get("architectures"))


def global_layer_fields(source: Source) -> dict:
    """Return the fields of a head with Gemma 4's global layers. Raises InputError."""
    fields = GEMMA4.read_fields(source, RecordedConfig(GEMMA4.config(source), source.config.read))
    if "windows" in fields:
        raise InputError(f"{source.path}: layer_types: Gemma 4's layers with a sliding window are not"
                         " supported in a head")
    return fields | {
        "head_dim": fields["global_head_dim"], "num_kv_heads": fields["global_kv_heads"],
        "windows": [0] * fields["num_layers"], "tie_embeddings": False}


def read_assistant(source: Source, kind: str, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read an assistant. Raises InputError if its config is not supported or does not fit the target."""
    config, tensors = source.config, {n.removeprefix("model."): entry for n, entry in source.tensors.items()}
    text = GEMMA4.fields(replace(source, config=config.get("text_config") or {}))
    ordered = config.get("use_ordered_embeddings")
    fields = text | {
        "kind": kind, "target_hidden_size": config.get("backbone_hidden_size", 1536), "shared_kv_layers": 0,
        "draft_vocab_size": text["vocab_size"], "aux_layers": [target.num_layers], "own_embedding": True,
        "own_lm_head": False, "tie_embeddings": True,
        "clusters": config.get("num_centroids", 2048) if ordered else 0,
        "active_clusters": config.get("centroid_intermediate_top_k", 32) if ordered else 0,
    }
    check_config(fields).check_caches(target, source.path)
    if order := tensors.get("masked_embedding.token_ordering"):
        tensors["masked_embedding.token_ordering"] = Entry(
            (*order.shape, 4), torch.uint8, lambda: order.read().int()[:, None].view(torch.uint8))
    return ReadHead(fields, NAMES, tensors)
