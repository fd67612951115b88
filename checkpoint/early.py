"""What can be said of a checkpoint that an option names, before torch is imported."""
from __future__ import annotations

import re
from pathlib import Path

from checkpoint.names import CONFIG, glance
from common.errors import InputError
from common.files import read_json


def check_source(checkpoint: str, what: str = "--checkpoint") -> bool:
    """Whether an option names a folder or file; it may be on the hub. Raises InputError if it is neither."""
    try:
        there = Path(checkpoint).exists()
    except (OSError, ValueError):
        there = False
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", checkpoint)
    if not there and not hub_id:
        raise InputError(
            f"{what} {checkpoint}: no such file or folder; name a converted folder, a Hugging Face folder,"
            " a .gguf file or a hub id (org/name)"
        )
    return there


def check_target(
    checkpoint: str, max_seq_len: int | None = None, offload: int | str | None = None
) -> None:
    """Raise InputError unless this is a converted target whose texts can be so long, and which has as many
    layers as --offload names.
    """
    config = glance(checkpoint, "target")
    longest, layers = config.get("max_seq_len"), config.get("num_layers")
    if max_seq_len is not None and isinstance(longest, int):
        check_length(max_seq_len, longest)
    if isinstance(offload, int) and isinstance(layers, int) and offload > layers:
        raise InputError(f"--offload {offload}: {checkpoint} has {layers} layers")


def check_checkpoint(
    checkpoint: str, max_seq_len: int | None = None, offload: int | str | None = None
) -> None:
    """Raise InputError if there is no such checkpoint, or `check_target` does.

    Of one that is still to be converted only its being there is judged.
    """
    config = Path(checkpoint) / CONFIG
    if check_source(checkpoint) and config.is_file() and "format" in read_json(config):
        check_target(checkpoint, max_seq_len, offload)


def check_length(max_seq_len: int, longest: int) -> None:
    """Raise InputError unless texts may be so long. longest: the model's maximum."""
    if not 2 <= max_seq_len <= longest:
        raise InputError(f"--max-seq-len {max_seq_len}: must be 2 to {longest}, the model's maximum")


def check_head(what: str, folder: str | None, kind: str | None = None) -> None:
    """Raise InputError if an option names a folder that is not one of ours, or of another kind."""
    if folder is None:
        return
    if not Path(folder).is_dir():
        missing = "target" if kind == "target" else "draft head or model"
        raise InputError(f"{what} {folder}: not a folder, there is no {missing} there; convert one into it")
    try:
        glance(folder, kind)
    except InputError as e:
        raise InputError(f"{what} {e}") from None
