"""Recognize the kind of a draft head in any layout, and read it. `extensions.HEADS` has its network."""
from __future__ import annotations

import re
from dataclasses import replace

from checkpoint import layouts
from checkpoint.assistant import read_assistant
from checkpoint.block_layouts import read_block
from checkpoint.dense import RecordedConfig, reject_unread
from checkpoint.eagle_layouts import read_eagle
from checkpoint.layouts import HeadOptions, ReadHead
from checkpoint.medusa_layouts import MEDUSA2, read_medusa
from checkpoint.source import Source
from common.errors import InputError
from model import ModelArgs

# By kind: (source, kind, target, options) -> ReadHead.
HEAD_READERS = {
    **dict.fromkeys(("eagle", "eagle3", "p-eagle"), read_eagle),
    **dict.fromkeys(("medusa", "hydra"), read_medusa),
    **dict.fromkeys(("dflash", "dspark"), read_block), "mtp": read_assistant,
}
MEDUSA = re.compile(r"(medusa_head\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)")


def identify(source: Source, is_head: bool) -> tuple[str, Source]:
    """Return "target" or the kind of a head, and the source with only its tensors. is_head: with --target.

    A Medusa-2 checkpoint contains a target and its heads.
    """
    others = {name: entry for name, entry in source.tensors.items() if not name.startswith(MEDUSA2)}
    has_layers = any(name.startswith("model.layers.") for name in others)
    if not is_head and has_layers and len(others) < len(source.tensors):
        return "target", replace(source, tensors=others)
    return kind_of(source) or "target", source


def kind_of(source: Source) -> str | None:
    """Return the kind of a head by its tensors and config, None for a target."""
    config, names = source.config, {name.removeprefix("model.") for name in source.tensors}
    classes = " ".join(map(str, config.get("architectures") or ()))
    library = config.get("speculators_model_type")
    kinds = f"{classes} {library} {config.get('model_type')}".lower()
    if other := re.search("(mlp|lstm)_?speculator", kinds):
        raise InputError(f"{source.path}: {other[1].upper()} speculators are not supported; use another head")
    if "gemma4_assistant" in kinds or "gemma4_unified_assistant" in kinds:
        return "mtp"
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    if any(map(MEDUSA.fullmatch, names)):
        return "medusa"
    # P-EAGLE heads may have a Markov head too.
    markov = any(name.startswith("markov_head.") for name in names) and "mask_hidden" not in names
    if library == "dspark" or "DSpark" in classes or markov:
        return "dspark"
    if library == "dflash" or "DFlash" in classes or "JetSpec" in classes or "dflash_config" in config:
        return "dflash"
    if library == "peagle" or "mask_hidden" in names or ("fc.weight" in names and any(
            config.get(key) is not None for key in ("pard_token", "ptd_token_id"))):
        return "p-eagle"
    norms = {"layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"}
    if library == "eagle" or "EagleSpeculator" in classes:
        if config.get("layernorms") or "embedding_layernorm.weight" in names:
            raise InputError(f"{source.path}: EAGLE-1 heads with layernorms (HASS) are not supported")
        return "eagle"
    if library not in (None, "eagle3"):
        raise InputError(f"{source.path}: speculators type {library!r} is not supported; use another head")
    if library or config.get("draft_vocab_size") or norms & names:
        return "eagle3"
    return "eagle" if "fc.weight" in names else None


def read_layout(source: Source, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read a head, except its embedding, lm_head and vocabulary map, which need the target's weights.

    Raises InputError if the variant is not supported, if the target has another number of layers, or if an
    option is missing.
    """
    layers = source.config.get("num_target_layers")
    if layers is not None and layers != target.num_layers:
        raise InputError(f"{source.path}: config: num_target_layers is {layers}, the target has"
                         f" {target.num_layers} layers")
    kind, config = kind_of(source), layouts.flat_config(source.config)
    head = HEAD_READERS[kind](replace(source, config=config), kind, target, options)
    if config.read:  # Medusa's configs are not read: tensors have all settings
        inner = {"text_config": 0} | config.get("text_config", {})  # read as that of a target
        own = RecordedConfig({k: v for k, v in config.items() if k not in inner}, config.read)
        reject_unread(source.path, own, ("attention_bias", "num_local_experts"))  # tensors determine these
    return head
