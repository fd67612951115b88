"""Check our checkpoint folders before they are written, copied or trusted."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import torch

from checkpoint.load import ADVICE, CONFIG, WEIGHTS, is_converted, is_ours, read_config
from checkpoint.source import open_source, resolve_source
from common.errors import InputError, check_file, read_json
from common.names import program
from extensions import HEADS


def check_exact(checkpoint: str | Path, config: dict | None = None) -> None:
    """Raise InputError if a checkpoint is quantized, except for its experts.

    config: its config.json; None: it is not converted yet.
    """
    if config is not None:
        found = config.get("quantization", {}).get("mode")
    else:
        tensors = open_source(resolve_source(checkpoint)).tensors.values()
        found = next((entry.quantized for entry in tensors if entry.quantized), None)
    if found:
        raise InputError(f"{checkpoint}: is quantized already ({found}); name the checkpoint before"
                         " quantization, or convert a quantized source with --dtype bf16")


def how_to_convert(folder: Path, kind: str | None) -> str:
    """Return how to convert a folder: a command to run, if all of it is known."""
    source, command = quote(str(folder)), f"{program('convert')} --checkpoint"
    if is_converted(folder.parent):  # a head, where its conversion will be
        aside, target = quote(f"{folder}-source"), quote(str(folder.parent))
        return f"run mv {source} {aside} && {command} {aside} --target {target} --out {source}"
    if kind in HEADS:
        return "convert it with convert_checkpoint.py and --target, the converted model that it is for"
    out = quote(f"{folder}-converted")
    return f"run {command} {source} --out {out}; then name {out}"


def check_out(out: Path, kind: str, force: bool) -> None:
    """Raise InputError if `out` exists, except, with `force`, as a converted folder of the same kind."""
    place = out.resolve()  # "new/.." names something else once "new" is there
    if not place.exists() and not out.is_symlink():
        return
    try:
        old = read_json(place / CONFIG)
    except InputError:
        old = {}
    if not is_ours(old):  # of any version: --force replaces old ones too
        raise InputError(f"{out}: exists and is not one of our checkpoint folders; choose another --out")
    if old["kind"] != kind:
        raise InputError(f"{out}: is of kind {old['kind']!r}, which {kind} may not replace; choose another"
                         " --out")
    if not force:
        raise InputError(f"{out}: exists; replace it with --force or choose another --out")


def verify_weights(
    checkpoint: str | Path, draft: str | Path | None, must: bool, log: Callable[[str], None]
) -> None:
    """Compare the weights of a target, of the heads inside its folder and of `draft` with their sha256.

    must: reject folders without a sha256, which older versions wrote; else log them. Raises InputError if a
    file does not match.
    """
    heads = [Path(checkpoint, kind) for kind in HEADS if Path(checkpoint, kind, CONFIG).exists()]
    for folder in [Path(checkpoint), *heads, *([Path(draft)] if draft else [])]:
        expected, path = read_config(folder).get("sha256"), folder / WEIGHTS
        if expected is None:
            words = f"{folder / CONFIG}: has no sha256 to verify the weights with; {ADVICE} to have one"
            if must:
                raise InputError(words)
            log(words)
            continue
        check_file(path)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if (found := digest.hexdigest()) != expected:
            raise InputError(f"{path}: its sha256 is {found}; expected {expected}: it is damaged, or was"
                             f" changed; {ADVICE}")
    log(f"verified the weights of {checkpoint}")


def identity(model: torch.nn.Module) -> str:
    """Return a digest of dtype and about 1,024 values of every weight. It also differs between fine-tunes."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        some = p.detach().flatten()[:: max(1, p.numel() // 1024)]
        digest.update(f"{name} {some.dtype}".encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()
