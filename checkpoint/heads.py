"""Kinds of draft heads, and the functions that read each in the layouts of other programs.

A kind is an entry of `READERS`; its network is in `extensions.HEADS`. `checkpoint.export` writes EAGLE heads.
"""
from __future__ import annotations

import re
from collections.abc import Callable

from checkpoint.block_layouts import read_block
from checkpoint.dense import HeadOptions, ReadHead
from checkpoint.eagle_layouts import read_eagle
from checkpoint.medusa_layouts import read_medusa, target_inside
from checkpoint.source import Source
from common.errors import InputError
from model import ModelArgs

MEDUSA = re.compile(r"(medusa_head\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)")


READERS: dict[str, Callable[[Source, str, ModelArgs, HeadOptions], ReadHead]] = {
    "eagle": read_eagle, "eagle3": read_eagle, "p-eagle": read_eagle, "medusa": read_medusa,
    "hydra": read_medusa, "dflash": read_block, "dspark": read_block,
}


def identify(source: Source, is_head: bool) -> tuple[str, Source]:
    """Return "target" or the kind of a head, and what of the source it is. is_head: with --target.

    A Medusa-2 model is a target that carries heads.
    """
    if not is_head and (inside := target_inside(source)):
        return "target", inside
    return kind_of(source) or "target", source


def kind_of(source: Source) -> str | None:
    """Return the kind of a head by the first mark that it has, None for a target."""
    config, names = source.config, {name.removeprefix("model.") for name in source.tensors}
    classes = " ".join(map(str, config.get("architectures") or ()))
    said = config.get("speculators_model_type")
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    if any(map(MEDUSA.fullmatch, names)):
        return "medusa"
    # P-EAGLE heads may have a Markov head too.
    markov = any(name.startswith("markov_head.") for name in names) and "mask_hidden" not in names
    if said == "dspark" or "DSpark" in classes or markov:
        return "dspark"
    if said == "dflash" or "DFlash" in classes or "JetSpec" in classes or "dflash_config" in config:
        return "dflash"
    if said == "peagle" or "mask_hidden" in names or any(
            config.get(key) is not None for key in ("pard_token", "ptd_token_id")):
        return "p-eagle"
    norms = {"layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"}
    if said or config.get("draft_vocab_size") or norms & names:
        return "eagle3"
    return "eagle" if "fc.weight" in names else None


def read_layout(source: Source, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read all of a head but its embedding, lm_head and vocabulary map: those need the target's weights.

    Raises InputError if the head is a variant that we cannot run, if it was made for a target of another
    depth, or if it takes an option that is missing.
    """
    depth = source.config.get("num_target_layers")
    if depth is not None and depth != target.num_layers:
        raise InputError(f"{source.path}: config: num_target_layers is {depth}, the target has"
                         f" {target.num_layers} layers")
    kind = kind_of(source)
    return READERS[kind](source, kind, target, options)
