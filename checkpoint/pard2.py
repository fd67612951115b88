"""PARD-2 draft models as published: the projection of the target's features is in a separate file."""
from __future__ import annotations

import torch

from checkpoint.dense import NameTable
from checkpoint.source import PROJECTION_FILE, Entry, Source
from common.cli import log_stderr
from common.errors import InputError

PROJECTION = "target_proj.weight"


def read_projection(source: Source, config: dict, tensors: dict[str, Entry]) -> NameTable:
    """Add fields of `networks.pard2.Pard2Args` to config, and sort the projection's inputs by layer.

    Returns the table of the projection. Raises InputError if it does not fit the published config.
    """
    flags, projection = source.config, tensors.get(PROJECTION)
    layers, size = flags["pard2_target_layers"], flags.get("pard2_target_dim")
    if projection is None:
        log_stderr(f"warning: {source.path}: has no {PROJECTION_FILE}, so it drafts as PARD, without the"
                   " target's features")
        return {}
    if flags.get("pard2_proj_bias"):
        raise InputError(f"{source.path}: pard2_proj_bias is not supported")
    if projection.shape[1] != size or size % len(layers) or min(layers) < 0 <= max(layers):
        raise InputError(f"{source.path}: {PROJECTION} {list(projection.shape)} does not fit"
                         f" pard2_target_layers {layers} and pard2_target_dim {size}")
    order = sorted(range(len(layers)), key=layers.__getitem__)
    tensors[PROJECTION] = projection.columns(torch.arange(size).view(len(layers), -1)[order].flatten())
    config |= {"feature_layers": sorted(layers), "feature_size": size,
               "feature_scale": flags.get("pard2_scale", 0.02)}
    return {"w_features.weight": [PROJECTION]}
