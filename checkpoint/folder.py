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


def check_unquantized(checkpoint: str | Path, config: dict | None = None) -> None:
    """Raise InputError if a checkpoint is quantized, except for its experts.

    config: its config.json; None: it is not converted yet.
    """
    if config is not None:
        quantized = config.get("quantization", {}).get("mode")
    else:
        tensors = open_source(resolve_source(checkpoint)).tensors.values()
        quantized = next((entry.quantized for entry in tensors if entry.quantized), None)
    if quantized:
        config = config or {"kind": "target", "source": checkpoint}
        advice = "pass the unquantized checkpoint"
        if config["kind"] == "target" and "source" in config:
            out = quote(f"checkpoints/{Path(checkpoint).name.removesuffix('.gguf')}-bf16")
            advice = (f"run {program('convert')} --checkpoint {quote(str(config['source']))} --dtype bf16"
                      f" --out {out}; then quantize {out}")
        raise InputError(f"{checkpoint}: is already quantized ({quantized}); {advice}")


def how_to_convert(folder: Path, kind: str | None) -> str:
    """Return advice for errors on converting a folder: the command, or the options that it needs."""
    source, command = quote(str(folder)), f"{program('convert')} --checkpoint"
    if is_converted(folder.parent):  # a head inside the target's folder: its converted head takes its place
        aside, target = quote(f"{folder}-source"), quote(str(folder.parent))
        return f"run mv {source} {aside} && {command} {aside} --target {target} --out {source}"
    if kind in HEADS:
        return "convert it with convert_checkpoint.py and --target, the converted model that it is for"
    out = quote(f"{folder}-converted")
    return f"run {command} {source} --out {out}; then pass {out}"


def check_out(out: Path, kind: str, force: bool) -> None:
    """Raise InputError if `out` exists, except, with `force`, as a converted folder of the same kind."""
    resolved = out.resolve()  # "new/.." is another folder once "new" exists
    if not resolved.exists() and not out.is_symlink():
        return
    try:
        old = read_json(resolved / CONFIG)
    except InputError:
        old = {}
    if not is_ours(old):  # of any version: --force replaces old ones too
        raise InputError(f"{out}: exists and is not one of our checkpoint folders; choose another --out")
    if old["kind"] != kind:
        raise InputError(f"{out}: holds a checkpoint of kind {old['kind']}, not {kind}; choose another --out")
    if not force:
        raise InputError(f"{out}: exists; replace it with --force or choose another --out")


def verify_weights(
    checkpoint: str | Path, draft: str | Path | None, require_digest: bool, log: Callable[[str], None]
) -> None:
    """Compare the weights of a target, of the heads inside its folder and of `draft` with their sha256.

    require_digest: reject folders without a sha256, which older versions wrote; else log them. Raises
    InputError if a file does not match.
    """
    heads = [Path(checkpoint, kind) for kind in HEADS if Path(checkpoint, kind, CONFIG).exists()]
    for folder in [Path(checkpoint), *heads, *([Path(draft)] if draft else [])]:
        expected, path = read_config(folder).get("sha256"), folder / WEIGHTS
        if expected is None:
            message = f"{folder / CONFIG}: has no sha256 to verify the weights with; {ADVICE} to add it"
            if require_digest:
                raise InputError(message)
            log(message)
            continue
        check_file(path)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if (actual := digest.hexdigest()) != expected:
            raise InputError(f"{path}: its sha256 is {actual}; expected {expected}: damaged or modified;"
                             f" {ADVICE}")
    log(f"verified the weights of {checkpoint}")


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of dtype and about 1,024 values of every weight; it differs between fine-tunes."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        sample = p.detach().flatten()[:: max(1, p.numel() // 1024)]
        digest.update(f"{name} {sample.dtype}".encode() + sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()
