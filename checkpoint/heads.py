"""Kinds of draft heads, and the functions that read and write each in the layouts of other programs.

A kind is an entry of `KINDS`; its network is in `extensions.HEADS`. Heads are written by

    python -m checkpoint.export --head checkpoints/mine/eagle3 --checkpoint checkpoints/mine --out DIR
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from checkpoint.block_layouts import read_block, write_block
from checkpoint.dense import HeadOptions, ReadHead
from checkpoint.eagle_layouts import read_eagle, write_eagle1, write_eagle3
from checkpoint.folder import CONFIG, WEIGHTS
from checkpoint.layouts import Published
from checkpoint.medusa_layouts import read_medusa, target_inside, write_medusa
from checkpoint.source import Source
from common.errors import InputError
from common.files import staging
from extensions import HEAD_OPTIONS, HEADS
from head import Head
from model import ModelArgs

LAYOUTS = ("sglang", "speculators")
MEDUSA = re.compile(r"(medusa_head\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)")


@dataclass(frozen=True)
class HeadKind:
    """A reader and a writer of one kind of head. architectures: in each of LAYOUTS that it has."""

    read: Callable[[Source, str, ModelArgs, HeadOptions], ReadHead]
    write: Callable[[Head, str, str, dict], Published]  # head, kind, layout, the target's config.json
    architectures: tuple[str, ...]


KINDS = {
    # vLLM needs LlamaForCausalLM here, SGLang the name below; the EAGLE repository ignores it.
    "eagle": HeadKind(read_eagle, write_eagle1, ("LlamaForCausalLMEagle",)),
    "eagle3": HeadKind(read_eagle, write_eagle3, ("LlamaForCausalLMEagle3", "Eagle3Speculator")),
    "p-eagle": HeadKind(read_eagle, write_eagle3, ("LlamaForCausalLMEagle3", "PEagleDraftModel")),
    "medusa": HeadKind(read_medusa, write_medusa, ("MedusaModel",)),
    "hydra": HeadKind(read_medusa, write_medusa, ("HydraModel",)),
    "dflash": HeadKind(read_block, write_block, ("DFlashDraftModel", "DFlashDraftModel")),
    "dspark": HeadKind(read_block, write_block, ("Qwen3DSparkModel", "DSparkDraftModel")),
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
    return KINDS[kind].read(source, kind, target, options)


def export(head: Head, folder: str | Path, layout: str = "sglang", target_config: dict | None = None) -> Path:
    """Save `head` as config.json and model.safetensors in bfloat16 -> the folder.

    Both are replaced at once; other files of the folder stay. The other arguments and errors are those of
    `write_head`. Raises InputError also where there is no space or no permission.
    """
    with staging(Path(folder), kept=lambda old: True) as made:
        write_head(head, made, layout, target_config)
    return Path(folder)


def write_head(head: Head, folder: Path, layout: str, target_config: dict | None) -> None:
    """Write config.json and model.safetensors into a folder that exists.

    The target's weights are left out. target_config: the target's config.json, for the speculators layout,
    which names the target. Raises InputError if the layout cannot hold this head, and OSError.
    """
    entry = f"{type(head).__module__}:{type(head).__name__}"
    kind = next(kind for kind in HEADS if entry in (HEADS[kind], *HEAD_OPTIONS.get(kind, {}).values()))
    if kind == "dflash" and head.args.markov_rank:
        kind = "dspark"
    if kind not in KINDS:
        raise InputError(f"an {kind} layer is part of its target's checkpoint, and is not written alone")
    architectures = dict(zip(LAYOUTS, KINDS[kind].architectures))
    if layout not in architectures:
        raise InputError(f"the {layout} layout has no place for {kind} heads; write --layout sglang")
    config, tensors = KINDS[kind].write(head, kind, layout, target_config or {})
    config = {"architectures": [architectures[layout]], **config}
    for name, t in tensors.items():
        tensors[name] = t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else None).contiguous()
    # Not save_file, which makes a file that only its owner can read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
