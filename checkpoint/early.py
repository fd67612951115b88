"""What can be said of a checkpoint that an option names, before torch is imported."""
from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from checkpoint.names import CONFIG, glance, is_gguf, is_ours
from common.errors import InputError
from common.files import read_json
from common.schema import in_words


def check_source(checkpoint: str, what: str = "--checkpoint") -> bool:
    """Whether an option names a folder or file; it may be on the hub. Raises InputError if it is neither."""
    try:
        there = Path(checkpoint).exists()
    except (OSError, ValueError):
        there = False
    path = Path(checkpoint)
    if there and not (path.is_dir() or (is_gguf(path) and path.is_file())):
        raise InputError(f"{what} {checkpoint}: not a folder, nor a .gguf file")
    if there and path.is_dir() and not (path / CONFIG).exists():
        raise InputError(f"{what} {checkpoint}: holds no {CONFIG}; name the folder of a checkpoint")
    hub_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", checkpoint)
    if not there and not hub_id:
        raise InputError(
            f"{what} {checkpoint}: no such file or folder; name a converted folder, a Hugging Face folder,"
            " a .gguf file or a hub id (org/name)"
        )
    return there


def check_target(
    checkpoint: str, max_seq_len: int | None = None, offload: int | str | None = None
) -> dict:
    """The config.json of a converted target, of which only this is judged: texts can be so long, and there
    are as many layers as --offload names. Raises InputError.
    """
    config = glance(checkpoint, "target")
    longest, layers = config.get("max_seq_len"), config.get("num_layers")
    if max_seq_len is not None and isinstance(longest, int):
        check_length(max_seq_len, longest)
    if isinstance(offload, int) and isinstance(layers, int) and offload > layers:
        raise InputError(f"--offload {offload}: {checkpoint} has {layers} layers")
    return config


def check_unconverted(checkpoint: str) -> None:
    """Raise InputError if a folder to convert is one of ours. What is damaged in it shows later."""
    if check_source(checkpoint) and _holds_ours(Path(checkpoint)):
        raise InputError(f"--checkpoint {checkpoint}: is already converted")


def check_foreign(what: str, folder: str) -> None:
    """Raise InputError if a folder to export to is one of ours."""
    if _holds_ours(Path(folder)):
        raise InputError(f"{what} {folder}: holds a converted checkpoint; choose another folder")


def _holds_ours(folder: Path) -> bool:
    path = folder / CONFIG
    return path.is_file() and is_ours(read_json(path))


def check_checkpoint(
    checkpoint: str, max_seq_len: int | None = None, offload: int | str | None = None
) -> dict:
    """What `check_target` returns; nothing of a checkpoint that is still to be converted.

    Of that only its being there is judged. Raises InputError.
    """
    config = Path(checkpoint) / CONFIG
    if check_source(checkpoint) and config.is_file() and "format" in read_json(config):
        return check_target(checkpoint, max_seq_len, offload)
    return {}


def check_ids(flag: str, ids: Iterable[int], config: dict) -> None:
    """Raise InputError if an option names a token id that is none of the target's, as far as its config.json
    says.
    """
    size = config.get("vocab_size")
    for token in ids:
        if isinstance(size, int) and not 0 <= token < size:
            raise InputError(f"{flag} {token}: no token id of the target, which has 0 to {size - 1}")


def check_exact(folder: str | Path, config: dict) -> None:
    """Raise InputError if a folder of this config.json is quantised."""
    if "quantization" in config:
        raise InputError(f"{folder}: is quantised already; name the checkpoint before quantisation")


def check_copy(what: str, copy: dict, checkpoint: str, config: dict) -> None:
    """Raise InputError if a folder with the config.json `copy` is no quantised copy of the target with
    `config`.
    """
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"
    for key in (*sizes, "head_dim", "stop_ids"):
        if copy.get(key) != config.get(key):
            raise InputError(
                f"{what}: no copy of {checkpoint}: its {key} is {in_words(copy.get(key))}; expected"
                f" {in_words(config.get(key))}"
            )


def check_out(out: Path, kind: str, force: bool) -> None:
    """Raise InputError unless `out` is free or, with `force`, one of our folders of the same kind."""
    place = out.resolve()  # "new/.." names something else once "new" is there
    if not place.exists() and not out.is_symlink():
        return
    try:
        config = read_json(place / CONFIG)
        old_kind, _ = config["kind"], config["format"]  # of any version: --force replaces old ones too
    except (InputError, KeyError):
        raise InputError(
            f"{out}: exists and is not one of our checkpoint folders; choose another --out"
        ) from None
    if old_kind != kind:
        raise InputError(
            f"{out}: holds a {in_words(old_kind)} checkpoint, a {kind} may not replace it; choose another"
            " --out"
        )
    if not force:
        raise InputError(f"{out}: exists; replace it with --force or choose another --out")


def check_length(max_seq_len: int, longest: int) -> None:
    """Raise InputError unless texts may be so long. longest: the model's maximum."""
    if not 2 <= max_seq_len <= longest:
        raise InputError(f"--max-seq-len {max_seq_len}: must be 2 to {longest}, the model's maximum")


def check_head(what: str, folder: str | None, kind: str | None = None) -> dict:
    """The config.json of a folder that an option names, nothing if it names none.

    Raises InputError if the folder is not one of ours, or of another kind.
    """
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        missing = "target" if kind == "target" else "draft head or model"
        raise InputError(f"{what} {folder}: not a folder, there is no {missing} there; convert one into it")
    try:
        return glance(folder, kind)
    except InputError as e:
        raise InputError(f"{what} {e}") from None
