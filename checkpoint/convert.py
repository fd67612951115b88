"""Converting a checkpoint to our folder format: a target or a draft head (EAGLE, Medusa, Hydra).

The source is a Hugging Face folder, a hub repository (org/name) or a .gguf file. Every tensor is accounted
for before the first byte is written (`checkpoint.planning`). Then one tensor at a time is read, cast and
appended: memory does not grow with the model.
"""
from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint.early import check_out
from checkpoint.folder import MEASURED, read_config
from checkpoint.head_layouts import Answers, kind_of
from checkpoint.medusa_layouts import MEDUSA2
from checkpoint.names import CALIBRATION, CONFIG, FORMAT, WEIGHTS, is_gguf
from checkpoint.opening import open_source, resolve_source
from checkpoint.planning import plan_head, plan_target
from checkpoint.writer import write_folder
from common.dtypes import DTYPES, short_dtype
from common.errors import InputError
from common.files import read_bytes, read_json
from tokens.templates import find_template
from tokens.tokenizer import Tokenizer


def convert(
    checkpoint: str | Path, out: str | Path | None = None, target: str | Path | None = None,
    dtype: str = "keep", answers: Answers | None = None, template: str = "auto", force: bool = False,
    quiet: bool = False, allow_nonfinite: bool = False,
) -> Path:
    """Convert `checkpoint` into the folder `out` and return it. Its contents tell targets from heads.

    out: for a target by default `default_folder(checkpoint)`, for a head TARGET/KIND: eagle3, eagle
    (EAGLE-1/2), medusa or hydra. target: the converted folder of the model that a head belongs to; needed for
    a head, which is checked to fit. dtype: keep, bf16, fp16, fp32 or PyTorch's name for it; keep is what most
    of the source's numbers are stored in, bf16 if quantised. answers: for a head, what its files leave open.
    template: for a target without chat template, the one to add; see `templates.find_template`. force:
    replace `out` if it is one of our folders of the same kind; folders inside it, such as heads, are kept.
    allow_nonfinite: take weights that are nan or infinite as they are, with a warning.

    Raises InputError with one line on any bad input or lack of space. Nothing is left on disk then.
    """
    started = time.perf_counter()
    source = open_source(resolve_source(checkpoint))
    cast_to = None if dtype == "keep" else getattr(torch, DTYPES[short_dtype(dtype)])
    kind = kind_of(source)
    if kind == "medusa" and target is None and any(n.startswith("model.layers.") for n in source.tensors):
        # A Medusa-2 model carries its heads. This converts the target; with --target, the heads.
        kind = None
        source = replace(
            source, tensors={n: t for n, t in source.tensors.items() if not n.startswith(MEDUSA2)}
        )
    if kind and target is None:
        raise InputError(
            f"{source.path}: is a draft head and needs --target DIR, the converted model it is for"
        )
    if kind:
        out = Path(out or Path(target) / kind)
        config, plan = plan_head(source, Path(target), cast_to, answers or Answers())
    else:
        out = Path(out or default_folder(checkpoint))
        config, plan = plan_target(source, cast_to)
    name = _name(checkpoint)
    config = {"format": FORMAT, "name": name, "source": origin(checkpoint), **config}
    check_out(out, config["kind"], force)
    added = find_template(template, name, str(checkpoint), str(source.config.get("_name_or_path", "")))

    def tokenizer(folder: Path) -> bool:
        """Write the tokenizer's files, and the template if it is asked for or missing."""
        written = source.tokenizer(folder)
        if written and added and (template != "auto" or not Tokenizer.load(folder).has_template):
            (folder / "chat_template.jinja").write_text(added, encoding="utf-8")
        return written

    def calibration(folder: Path) -> bool:
        """Copy what is known of a head."""
        if (file := source.path / CALIBRATION).exists():
            MEASURED.require(read_json(file), file)
            shutil.copyfile(file, folder / CALIBRATION)
        return True

    others = calibration if kind else tokenizer
    has_tokenizer = write_folder(out, config, plan, others, quiet, allow_nonfinite, str(source.path))
    last = config["vocab_size"] - 1
    if not kind and has_tokenizer and (highest := Tokenizer.load(out).highest) > last:
        print(
            f"warning: {checkpoint}: its tokenizer has ids up to {highest:,}, the model up to {last:,};"
            " prompts with others are refused", file=sys.stderr,
        )
    if not has_tokenizer:
        print(f"warning: {checkpoint} has no tokenizer files; run it with --prompt-ids", file=sys.stderr)
    if not config.get("stop_ids", True):
        print(
            f"warning: {checkpoint} names no end token; texts end at --max-new-tokens only", file=sys.stderr
        )
    if not quiet:
        params = sum(math.prod(t.shape) for t in plan if t.dtype.is_floating_point)
        size = sum(t.nbytes for t in plan)
        seconds = time.perf_counter() - started
        print(f"wrote {out}: {config['kind']}, {params:,} parameters, {size:,} bytes, {seconds:.1f} s")
    return out


def default_folder(checkpoint: str | Path) -> Path:
    """Where a target is written unless --out says otherwise: checkpoints/NAME, in lower case."""
    return Path("checkpoints") / _name(checkpoint).lower()


def converted_folder(checkpoint: str, say: Callable[[str], None]) -> str:
    """The converted folder of any checkpoint: itself, or checkpoints/NAME.

    The latter is written now if it is missing or older than the checkpoint. Raises InputError if another
    checkpoint of the same name has been converted there.
    """
    try:
        read_config(checkpoint)
        return checkpoint
    except InputError:
        config = Path(checkpoint, CONFIG)
        if config.exists() and b'"format"' in read_bytes(config):
            raise  # ours, but of another version or damaged
    out, path = default_folder(checkpoint), Path(checkpoint)
    stale = False
    if out.is_dir():
        other = read_config(out).get("source")
        if other != origin(checkpoint):
            raise InputError(
                f"{out}: was converted from {other}; convert {checkpoint} with convert_checkpoint.py --out"
                " DIR and use DIR"
            )
        files = path.iterdir() if path.is_dir() else [path]
        written = (out / WEIGHTS).stat().st_mtime
        stale = any(f.stat().st_mtime > written for f in files if f.is_file())
    if stale or not out.is_dir():
        say(f"converting {checkpoint} into {out}")
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer
            convert(checkpoint, out, force=stale)
    return str(out)


def origin(checkpoint: str | Path) -> str:
    """What a converted folder's config says it came from: an absolute path, or the hub id."""
    return str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else str(checkpoint)


def _name(checkpoint: str | Path) -> str:
    path = Path(checkpoint)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else path.name
