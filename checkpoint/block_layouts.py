"""The layouts of heads that draft blocks: DFlash and DFlash2 (z-lab), DSpark (deepseek-ai/DeepSpec), and
DFlash and DSpark of the speculators library.

Tensors: "fc.weight", "hidden_norm.weight", "norm.weight", "layers.{i}.*" as in Qwen3; DSpark adds
"markov_head.markov_w1|markov_w2|gate_proj", "confidence_head.proj" and copies of the target's embedding and
lm_head. Configs number layers by their outputs (`target_layer_ids`), speculators by their inputs
(`aux_hidden_state_layer_ids`).
"""
from __future__ import annotations

from pathlib import Path

from checkpoint import layouts
from checkpoint.assistant import GLOBAL_LAYER, global_layer_fields, has_gemma4_layers
from checkpoint.configs import model_fields
from checkpoint.dense import LAYER, name_table, with_prefix
from checkpoint.layouts import HeadOptions, ReadHead, draft_vocab_size, layer_flags
from checkpoint.rotary import reordered
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs

BLOCK = name_table("block", "markov") | with_prefix(
    LAYER | {"attn_norm.weight": ["input_layernorm.weight"]}, "layers.{i}.", "layers.{i}.")
GEMMA4 = BLOCK | with_prefix(GLOBAL_LAYER, "layers.{i}.", "layers.{i}.")
COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")


def read_block(source: Source, kind: str, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read a DFlash or DSpark head.

    Raises InputError if the variant is not supported, or if its config lacks a setting that it needs.
    """
    path, flags = source.path, source.config
    tensors = {n.removeprefix("model."): entry for n, entry in source.tensors.items()}
    tensors = {name: entry for name, entry in tensors.items() if name not in COPIES}
    names = GEMMA4 if has_gemma4_layers(source) else BLOCK
    untied = flags | {"tie_word_embeddings": False}
    fields = global_layer_fields(source) if names is GEMMA4 else model_fields(path, untied)
    causal = [flags.get(key) for key in ("causal", "causal_head", "is_causal")]
    non_causal = flags.get("sliding_window_non_causal") or False in causal
    fields |= layer_flags(tensors) | {
        "kind": kind, "target_hidden_size": flags.get("target_hidden_size") or target.hidden_size,
        "draft_window": flags.get("draft_window") or 0,
        "aux_layers": _aux_layers(source, flags, target, options),
        "block": flags.get("block_size"), "mask_id": flags.get("mask_token_id"),
        "causal": any(causal),
        "windows_ahead": bool("windows" in fields and non_causal),
        "from_anchor": bool(flags.get("sample_from_anchor", kind == "dspark")),
        "own_lm_head": "lm_head.weight" in tensors, "own_mask": "mask_embedding" in tensors,
        "logit_factor": flags.get("output_multiplier", 1.0), **layouts.read_markov(source, flags, tensors),
    }
    if "DFlash2" in str(flags.get("architectures")):
        if flags.get("input_embedding_scale", 1) != 1:
            raise InputError(f"{path}: input_embedding_scale is not supported")
        tensors = {name.replace("codebook.weight", "codebook"): entry for name, entry in tensors.items()}
        fields["candidates"] = flags.get("selector_top_k", 16)
        fields |= _selector_sizes(path, tensors, fields["hidden_size"])
    fields["draft_vocab_size"] = draft_vocab_size(flags, tensors, fields["vocab_size"])
    if not flags.get("rope_is_neox_style", flags.get("is_neox_style", True)):
        tensors = reordered(tensors, fields, interleaved=True)
    return ReadHead(fields, names, tensors)


def _selector_sizes(path: Path, tensors: dict[str, Entry], hidden: int) -> dict:
    """Return the sizes of DFlash2's convolutions and selector. Raises InputError."""
    names = ("candidate_selector.hidden_projection.weight", "layers.0.attention_conv.base_kernel",
             "layers.0.attention_conv.kernel_projection.weight")
    if missing := [name for name in names if name not in tensors]:
        raise InputError(f"{path}: tensor {missing[0]} is missing")
    selector, base, kernel = (tensors[name].shape for name in names)
    taps = base[1] if len(base) == 3 else 0
    return {"selector_rank": selector[0], "conv_taps": taps, "conv_group": 2 * taps * hidden // kernel[0]}


def _aux_layers(source: Source, flags: dict, target: ModelArgs, options: HeadOptions) -> list[int]:
    """Return the target layers whose inputs the head reads. Raises InputError."""
    key, shift = ("target_layer_ids", 1) if "target_layer_ids" in flags else ("aux_hidden_state_layer_ids", 0)
    ids = flags.get(key)
    inputs = [*options.aux_layers] if options.aux_layers else [i + shift for i in ids or ()]
    if not inputs:
        raise InputError(f"{source.path}: config: {key} must be a list of layer numbers, found {ids!r};"
                         " pass --aux-layers")
    layouts.reject_last_layer(source.path, f"{key} {ids}", inputs, target)
    return inputs
