"""Quantised copies of the target: they write text and compute states nearly as it does, sooner."""
from __future__ import annotations

import argparse
from dataclasses import replace

from checkpoint.folder import read_config
from checkpoint.loading import identity, identity_of, load_model
from common.errors import InputError
from engine.runtime import Runtime
from kernels.choose import choose_backend
from kernels.tp import Ranks
from model import Transformer


def load_copy(
    o: argparse.Namespace, flag: str, folder: str, target: Transformer, ranks: Ranks | None
) -> tuple[Transformer, str]:
    """The quantised copy of the target that a flag names, ready to decode, and its identity.

    ranks: among whom both are dealt. Raises InputError if it is no copy of this target.
    """
    dtype = Runtime(dtype=o.dtype).torch_dtype
    copy, config = load_model(folder, o.device, dtype, ranks)
    same = replace(copy.args, tie_embeddings=target.args.tie_embeddings) == target.args
    if not same or config["stop_ids"] != read_config(o.checkpoint)["stop_ids"]:
        raise InputError(f"{flag} {folder}: no copy of {o.checkpoint}: their shapes or stop ids differ")
    name = identity_of(folder, dtype) if ranks else identity(copy)
    choose_backend(copy.embed.weight.device, o.compile).prepare(copy)
    return copy, name
