"""The layouts of EAGLE heads: EAGLE-1/2 (SafeAILab), EAGLE-3 (SafeAILab, SpecForge/SGLang, speculators/vLLM,
DeepSpec) and P-EAGLE.

Sizes come from the tensors, not from the config. If the files leave a setting open, the error names the flag
that sets it.
"""
from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from checkpoint import layouts
from checkpoint.assistant import GLOBAL_LAYER, global_layer_fields, has_gemma4_layers
from checkpoint.configs import model_fields
from checkpoint.dense import LAYER, NameTable, name_table, with_prefix
from checkpoint.layouts import HeadOptions, ReadHead, draft_vocab_size, layer_flags
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs

EAGLE = name_table("eagle")
EAGLE1 = EAGLE | with_prefix(LAYER, "layer.", "layers.0.")
EAGLE3_LAYER = name_table("eagle3_layer")  # of the first layer
MIDLAYER = "midlayer."
EAGLE3 = EAGLE | {"norm.weight": ["norm.weight"]} | with_prefix(EAGLE3_LAYER, "layer.", MIDLAYER)
FIRST_LAYER = "layers.0."  # prefix of the first layer; SafeAILab and SGLang use MIDLAYER
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


def eagle3_names(layers: int, feature_norm: str, states: int, first: str) -> NameTable:
    """Return the table of an EAGLE-3 or P-EAGLE head of `layers` layers that reads `states` hidden states.

    feature_norm: see `networks.eagle31.Eagle31Args`. first: the prefix of the first layer.
    """
    norms = {"": [], "all": ["input_norm"], "each": [f"fc_norm.{j}" for j in range(states)]}[feature_norm]
    names = EAGLE3 | name_table("markov") | {"mask_hidden": ["mask_hidden"]} | {
        f"fc_norms.{j}.weight": [f"{norm}.weight"] for j, norm in enumerate(norms)
    }
    names |= with_prefix(EAGLE3_LAYER, "layer.", first)
    for k in range(1, layers):
        later = LAYER | {"attn_norm.weight": ["input_layernorm.weight"]}
        names |= with_prefix(later, f"more_layers.{k - 1}.", f"layers.{k}.")
    return names


def read_eagle(source: Source, kind: str, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read an EAGLE head of any kind. Biases, norms and own matrices follow from the tensors.

    Raises InputError if the variant is not supported, or if an option is missing.
    """
    tensors, config = _unified_names(source), source.config
    first, lm_head = _first_layer_prefix(tensors), tensors.get("lm_head.weight")
    query, heads = tensors.get(f"{first}self_attn.q_proj.weight"), config.get("num_attention_heads")
    if query and heads:  # the file may have no head_dim, or a wrong one (Qwen)
        config["head_dim"] = query.shape[0] // heads
    is_gemma = kind == "eagle3" and has_gemma4_layers(source)
    fields = global_layer_fields(source) if is_gemma else model_fields(source.path, config)
    fields |= layer_flags(tensors, first) | {
        "kind": kind, "tie_embeddings": bool(config.get("tie_word_embeddings")) and lm_head is None,
        "target_hidden_size": config.get("target_hidden_size") or target.hidden_size,
        "draft_window": config.get("draft_window") or 0, "own_lm_head": lm_head is not None,
    }
    size = fields["vocab_size"]
    if kind == "eagle":
        fields |= {"num_layers": 1, "draft_vocab_size": size, "aux_layers": [target.num_layers]}
        return ReadHead(fields, EAGLE1, tensors)
    fields["draft_vocab_size"] = draft_vocab_size(config, tensors, size)
    fields["own_lm_head"] |= fields["draft_vocab_size"] != size
    return _read_eagle3(source, config, fields, tensors, target, options)


def _first_layer_prefix(tensors: dict[str, Entry]) -> str:
    """Return the prefix of the first layer."""
    return MIDLAYER if any(name.startswith(MIDLAYER) for name in tensors) else FIRST_LAYER


def _unified_names(source: Source) -> dict[str, Entry]:
    """Return the tensors by unified names: no prefix `model.` (vLLM), norms as in speculators, EAGLE-1
    as in SafeAILab's layout.
    """
    prefixes = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2",
                "fusion_fc": "fc", "transformer": "layers.0"}

    def rename(name: str) -> str:
        first, dot, rest = name.removeprefix("model.").partition(".")
        return prefixes.get(first, first) + dot + rest

    return {rename(name): entry for name, entry in source.tensors.items()}


def _of_speculators(config: dict) -> bool:
    """Return whether a head comes from the speculators library."""
    by_class = any(str(name).endswith("Speculator") for name in config.get("architectures") or ())
    return by_class or "speculators_model_type" in config or "transformer_layer_config" in config


def _read_eagle3(
    source: Source, head_config: dict, fields: dict, tensors: dict[str, Entry], target: ModelArgs,
    options: HeadOptions,
) -> ReadHead:
    path, flags = source.path, head_config
    if "fc_norm.0.weight" in tensors or flags.get("fc_norm"):
        feature_norm = "each"
    else:
        feature_norm = "all" if "input_norm.weight" in tensors or flags.get("norm_before_fc") else ""
    aux_layers = options.aux_layers or _aux_layers(path, head_config, tensors, fields, target)
    config = fields | {
        "aux_layers": list(aux_layers), "feature_norm": feature_norm,
        "norm_before_residual": _norm_before_residual(source, flags, options),
        "recycle_normed": _recycle_normed(source, flags, options),
    }
    if fields["kind"] == "p-eagle":
        keys = ("mask_token_id", "pard_token", "ptd_token_id")
        config |= layouts.read_markov(source, head_config, tensors) | {
            "mask_id": next((flags[key] for key in keys if key in flags), None),
            "drafts": head_config.get("num_draft_steps", head_config.get("k_train", 8)),
        }
    if mask := tensors.get("mask_hidden"):  # published as [1, 1, F]
        tensors["mask_hidden"] = mask.changed(Tensor.flatten, (math.prod(mask.shape),))
    for k in range(1, fields["num_layers"]):
        if norm := tensors.pop(f"layers.{k}.hidden_norm.weight", None):
            # SGLang norms the input of further layers by `hidden_norm` and ignores their other norm.
            tensors[f"layers.{k}.input_layernorm.weight"] = norm
    first = _first_layer_prefix(tensors)
    names = eagle3_names(fields["num_layers"], feature_norm, len(aux_layers), first)
    if has_gemma4_layers(source):
        names |= with_prefix(GLOBAL_LAYER, "layer.", first)
    return ReadHead(config, names, tensors)


def _norm_before_residual(source: Source, flags: dict, options: HeadOptions) -> bool:
    """Return the flag of that name.

    speculators trains with true, its config class defaults to false, vLLM assumes true: a missing key is
    ambiguous.
    """
    if options.norm_before_residual is not None:
        return options.norm_before_residual
    if "norm_before_residual" in flags:
        return bool(flags["norm_before_residual"])
    if _of_speculators(source.config):
        raise InputError(f"{source.path}: config has no norm_before_residual; pass --norm-before-residual or"
                         " --no-norm-before-residual (try both, one drafts far better)")
    return False


def _recycle_normed(source: Source, flags: dict, options: HeadOptions) -> bool:
    """Return whether the next step reads norm(h) instead of h.

    `norm_output` means this in speculators and SGLang, not in SpecForge.
    """
    if options.recycle is not None:
        return options.recycle == "normed"
    if flags.get("norm_output") is None:
        return False
    if _of_speculators(source.config):
        return bool(flags["norm_output"])
    raise InputError(f"{source.path}: norm_output differs between SGLang and SpecForge; pass --recycle"
                     " normed or --recycle raw (try both, one drafts far better)")


def _aux_layers(
    path: Path, head_config: dict, tensors: dict[str, Entry], fields: dict, target: ModelArgs
) -> tuple[int, ...]:
    """Return the target layers whose inputs feed the head.

    An id names a layer's output in SGLang and SpecForge, its input in vLLM and speculators. Most heads start
    with the second layer's output, so a first id of 1 means outputs, 2 means inputs. Others need
    --aux-layers, unless an id is the number of layers.
    """
    if inputs := head_config.get("aux_hidden_state_layer_ids"):  # GGUF files
        return tuple(inputs)
    in_config = [part.get(AUX_KEY) for part in (head_config.get("eagle_config", {}), head_config)]
    if outputs := head_config.get("target_layer_ids"):  # DeepSpec
        inputs = [i + 1 for i in outputs]
        if not any(in_config):
            layouts.reject_last_layer(path, f"target_layer_ids {outputs}", inputs, target)
        return tuple(inputs)
    by_key = {_as_inputs(path, ids, target) for ids in in_config if ids}
    if len(by_key) > 1:
        raise InputError(f"{path}: {AUX_KEY} has two different values, {in_config}; pass --aux-layers")
    if by_key:
        return by_key.pop()
    fc = tensors.get("fc.weight")
    states, rest = divmod(fc.shape[-1] if fc else 0, fields["target_hidden_size"])
    if states != 3 and not rest:  # other widths are reported as a wrong shape
        raise InputError(f"{path}: fc.weight reads {states} hidden states, and the config does not list"
                         " the layers; pass --aux-layers")
    return eagle3_aux_layers(target.num_layers)


def _as_inputs(path: Path, ids: list[int], target: ModelArgs) -> tuple[int, ...]:
    """Convert the layer ids of a config to layers whose inputs are read."""
    if ids[0] in (1, 2):
        return tuple(i + 2 - ids[0] for i in ids)
    if max(ids) == target.num_layers:  # no layer has that number, so ids are inputs
        return tuple(ids)
    inputs, outputs = (",".join(str(i + n) for i in ids) for n in (0, 1))
    raise InputError(f"{path}: {AUX_KEY} {ids} is ambiguous; pass --aux-layers {inputs} if these are"
                     f" layer inputs, {outputs} if outputs")


def eagle3_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the target layers whose inputs feed an EAGLE-3 head by default.

    Layers 2, L//2 and L-3 (SafeAILab/EAGLE, modeling_llama_kv.py); SpecForge writes the same states as
    "outputs of layers 1, L//2-1, L-4".
    """
    return 2, num_layers // 2, num_layers - 3
