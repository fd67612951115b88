"""Convert a checkpoint to our folder format: a target or a draft head.

All tensor names and shapes are matched against the model, in both directions, before anything is written.
Tensors are then read, cast and written one at a time, so peak memory does not depend on the model size.
"""
from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from checkpoint.as_stored import as_stored
from checkpoint.dense import STACKS, NameTable, parts_of
from checkpoint.families import family_of, mtp_names
from checkpoint.folder import check_out
from checkpoint.heads import identify, kind_of, read_layout
from checkpoint.layouts import HeadOptions
from checkpoint.load import (
    CONFIG,
    FORMAT,
    WEIGHTS,
    build_module,
    check_config,
    check_head_fits,
    check_shapes,
    is_converted,
    open_safetensors,
    read_config,
)
from checkpoint.pard2 import read_projection
from checkpoint.source import Entry, Source, open_source, resolve_source, unique_ids
from checkpoint.writer import Planned, write_checkpoint
from common.cli import dtype_name, log_stderr
from common.errors import InputError, counted, library_errors
from common.names import program
from common.schema import named
from common.writing import staging
from model import ModelArgs
from tokens.convert import stop_ids as stop_ids_of
from tokens.files import ENCODERS, MERGES
from tokens.tokenizer import Tokenizer

VOCABULARY_MAPS = "d2t", "token_map", "t2d"  # tensors of heads
Parts = dict[str, tuple[dict, list[Planned]]]  # by subfolder: config.json and tensors
# Buffers in old checkpoints that are computed from the config.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")


def convert(
    checkpoint: str | Path, out: str | Path | None = None, target: str | Path | None = None, *,
    dtype: str = "keep", options: HeadOptions = HeadOptions(), template: str = "auto", force: bool = False,
    quiet: bool = False,
) -> Path:
    """Convert `checkpoint`, a target or a draft head, into the folder `out` and return `out`.

    out: default `default_folder(checkpoint)` for a target, TARGET/KIND for a head (`extensions.HEADS`).
    target: converted folder of the head's target; required for heads, rejected for targets.
    dtype: keep, bf16, fp16, fp32 or PyTorch's name. keep: the dtype of most of the source's weights;
    quantized weights of a target stay quantized.
    options: settings that a head's files may leave open.
    template: chat template for a target without one, see `tokens.convert: find_template`.
    force: replace `out` if it is a converted folder of the same kind; its subfolders (heads) stay.

    Raises InputError on bad input or a full disk; `out` is unchanged then.
    """
    source = open_source(resolve_source(checkpoint))
    cast_to = None if dtype == "keep" else getattr(torch, dtype_name(dtype))
    kind, source = identify(source, bool(target))
    if (kind == "target") == bool(target):
        what = "not a draft head; omit --target" if target else "a draft head; add --target FOLDER"
        raise InputError(f"{source.path}: is {what}")
    if target:
        out = Path(out or Path(target) / kind)
        parts = {"": plan_head(source, Path(target), cast_to, options)}
    else:
        out = Path(out or default_folder(checkpoint))
        parts = plan_target(source, cast_to)
    num_weights = {tensor.name: math.prod(tensor.shape) for tensor in parts[""][1]}
    if not target and cast_to is None and any(entry.quantized for entry in source.tensors.values()):
        parts[""] = as_stored(*parts[""])
    name, (config, plan) = _name(checkpoint), parts[""]
    check_out(out, config["kind"], force)

    with staging(out) as folder:
        if not target:
            tokenizer = source.tokenizer and _write_tokenizer(source, folder, template, checkpoint)
            stop_ids = unique_ids(config["stop_ids"], stop_ids_of(tokenizer) if tokenizer else None)
            config["stop_ids"] = [i for i in stop_ids if i < config["vocab_size"]]
        for part, (fields, tensors) in parts.items():
            fields = {"format": FORMAT, "name": name, "source": origin(checkpoint)} | fields
            write_checkpoint(folder / part, fields, tensors, quiet=quiet, where=str(source.path))
    if not target:
        _warn(checkpoint, tokenizer, config)
    if not quiet:
        model = config.get("architecture", config["kind"])
        model += f", {counted(config['num_layers'], 'layer')}" if "num_layers" in config else ""
        lm_head, size = num_weights.get("lm_head.weight"), sum(tensor.nbytes for tensor in plan)
        lm_head = f" (lm_head {lm_head / 1e6:,.0f} million)" if lm_head else ""
        dtype = str(max(plan, key=lambda tensor: tensor.nbytes).dtype)[6:]  # draft ids have another dtype
        stored = "quantized as stored" if "quantization" in config else dtype
        print(f"wrote {out}: {model}, {sum(num_weights.values()) / 1e6:,.0f} million parameters{lm_head},"
              f" {stored}, {size / 1e9:,.2f} GB")
    return out


def next_steps(out: Path, target: str | None = None) -> str:
    """Return commands that use a converted folder on this machine. target: of a head."""
    model, draft = quote(str(target or out)), "--speculate auto"
    if target and out.parent.resolve() != Path(target).resolve():
        draft = f"--draft {quote(str(out))}"
    lines = [f"next: {program('generate')} -m {model} {draft} 'Why is the sky blue?'"]
    if not (target or torch.cuda.is_available() or "quantization" in read_config(out)):
        mode = "w4a8" if (out / WEIGHTS).stat().st_size > 2e9 else "w8a8"  # from 1B parameters
        lines.append(f"faster on this CPU after: {program('quantize')} -m {model} --mode {mode}")
    return "\n".join(lines)


def is_head(checkpoint: str | Path) -> bool:
    """Return whether an unconverted checkpoint is a draft head. Raises InputError."""
    return bool(kind_of(open_source(resolve_source(checkpoint))))


def _write_tokenizer(source: Source, folder: Path, template: str, checkpoint: str | Path) -> Tokenizer | None:
    """Write the tokenizer files, and a chat template if --template asks for one or the source has none.

    Returns the tokenizer, or None if the source has none.
    """
    from tokens.convert import find_template

    names = _name(checkpoint), str(checkpoint), str(source.config.get("_name_or_path", ""))
    added = find_template(template, *names)
    if not source.tokenizer(folder, added=added):
        return None
    tokenizer = Tokenizer.load(folder)
    if added and (template != "auto" or not tokenizer.has_template):
        (folder / "chat_template.jinja").write_text(added, encoding="utf-8")
        (folder / "tool_use.jinja").unlink(missing_ok=True)  # superseded by the added template
    return tokenizer


def _warn(checkpoint: str | Path, tokenizer: Tokenizer | None, config: dict) -> None:
    """Warn about a missing tokenizer, chat template or stop token, and ids beyond the vocabulary."""
    if tokenizer is None:
        log_stderr(f"warning: {checkpoint} has no tokenizer files ({', '.join(ENCODERS)} with {MERGES}); run"
                   " it with --prompt-ids")
    elif tokenizer.vocab_size > config["vocab_size"]:
        log_stderr(f"warning: {checkpoint}: its tokenizer has {tokenizer.vocab_size:,} ids, the model"
                   f" {config['vocab_size']:,}; prompts with other ids are rejected")
    if tokenizer and not tokenizer.has_template:
        log_stderr(f"warning: {checkpoint} has no chat template: prompts are continued as plain text")
    if not config["stop_ids"]:
        log_stderr(f"warning: {checkpoint} has no stop token; generation only stops at --max-new-tokens")


def default_folder(checkpoint: str | Path) -> Path:
    """Return the default output folder of a target: checkpoints/NAME, in lower case."""
    return Path("checkpoints") / _name(checkpoint).lower()


def converted_folder(
    checkpoint: str | Path, log: Callable[[str], None], target: str | Path | None = None
) -> str:
    """Return the converted folder of a checkpoint, converting it first if that is missing or outdated.

    The folder is `checkpoint` itself if it is converted, else checkpoints/NAME, or TARGET/NAME for a head of
    the converted folder `target`. Raises InputError if another checkpoint was converted into that folder, or
    if conversion is needed under torchrun, where all processes would write the same folder.
    """
    checkpoint = str(checkpoint)
    if is_converted(checkpoint) or os.environ.get("WORLD_SIZE", "1") != "1":
        read_config(checkpoint)
        return checkpoint
    out, path = default_folder(checkpoint), Path(checkpoint)
    out, stale = Path(target) / out.name if target else out, False
    if out.is_dir():
        other = read_config(out).get("source")
        if other != origin(checkpoint):
            raise InputError(f"{out}: was converted from {other}; convert {checkpoint} into another folder"
                             " with convert_checkpoint.py --out, and pass that folder")
        files = path.iterdir() if path.is_dir() else [path]
        converted_at = (out / WEIGHTS).stat().st_mtime
        stale = any(f.stat().st_mtime > converted_at for f in files if f.is_file())
    if stale or not out.is_dir():
        resolve_source(checkpoint)
        log(f"converting {checkpoint} into {out}")
        with contextlib.redirect_stdout(sys.stderr), library_errors(f"{checkpoint}: malformed"):
            convert(checkpoint, out, target, force=stale)  # keep stdout free for generated text
    return str(out)


def origin(checkpoint: str | Path) -> str:
    """Return the `source` that a converted folder's config.json records: absolute path, or hub id."""
    return str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else str(checkpoint)


def _name(checkpoint: str | Path) -> str:
    path = Path(checkpoint)
    return path.resolve().name if path.is_dir() else path.stem if path.is_file() else path.name


def plan_target(source: Source, dtype: torch.dtype | None) -> Parts:
    """Plan the conversion of a target: subfolder -> (config, tensors to write); "" is the target itself.

    dtype: of the written tensors; None: the dtype of most of the source's weights. Raises InputError if the
    config or a tensor does not fit.
    """
    family = family_of(source.path, source.architecture)
    fields, names = family.fields(source), family.names
    stop_ids = [i for i in source.stop_ids if i < fields["vocab_size"]]
    config = {
        "kind": "target", "architecture": family.architecture, **fields, "stop_ids": stop_ids,
        "bos_id": source.bos_id,
    }
    if (mask := source.config.get("pard_token")) is not None:  # a draft model, see `drafters.pard`
        config["pard_token"] = mask
    tensors = family.tensors(source, config)
    if source.config.get("pard2_target_layers"):
        names = names | read_projection(source, config, tensors)
    name = names["lm_head.weight"][0]
    if config["tie_embeddings"] and name in tensors:
        # Some files hold the tied matrix twice. transformers 4 ignores the second copy, transformers 5 uses
        # it: drop it only if both are equal.
        copy, embed = tensors.pop(name), tensors.get(names["embed.weight"][0])
        if embed is None or copy.shape != embed.shape or not torch.equal(copy.read(), embed.read()):
            raise InputError(f"{source.path}: tie_word_embeddings is true, yet {name} differs from the"
                             f" embedding; set it to false in config.json to use {name}")
    plan = plan_tensors(source, config, names, tensors, dtype, family.stacks)
    parts, (fields, tensors) = {"": (config, plan)}, family.mtp_layer(source, config)
    if tensors:
        try:
            mtp = plan_tensors(source, fields, mtp_names(names), tensors, plan[0].dtype, family.stacks)
            parts["mtp"] = fields, [planned_ids(torch.arange(config["vocab_size"])), *mtp]
        except InputError as e:  # the target works without it
            log_stderr(f"warning: the MTP layer is not converted: {e}")
    return parts


def plan_head(
    source: Source, target: Path, dtype: torch.dtype | None, options: HeadOptions
) -> tuple[dict, list[Planned]]:
    """Plan the conversion of a head of the converted target `target`: (config, tensors to write).

    dtype: see `plan_target`. Raises InputError if the config, a tensor or the target does not fit.
    """
    path, target_args = source.path, check_config(read_config(target, "target"))
    head = read_layout(source, target_args, options)
    config, tensors = dict(head.config), dict(head.tensors)
    embed, lm_head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    config["own_embedding"] = embed is not None and not _equals_target(embed, target, "embed.weight")
    if embed is not None and not config["own_embedding"]:
        del tensors["embed_tokens.weight"]
    target_lm_head = "embed.weight" if target_args.tie_embeddings else "lm_head.weight"
    if lm_head is not None and config["draft_vocab_size"] == target_args.vocab_size and _equals_target(
        lm_head, target, target_lm_head
    ):
        config["own_lm_head"] = False  # heads repackaged for vLLM contain a copy of the target's
        del tensors["lm_head.weight"]
    check_head_fits(_args(source, config), target_args, str(path))
    maps = {name: tensors.pop(name) for name in VOCABULARY_MAPS if name in tensors}
    ids, order = _draft_ids(path, maps, config["draft_vocab_size"], config["vocab_size"])
    for name, sources in head.names.items():
        if name.startswith(("lm_head", "markov_out.")):  # one row for each draft id
            tensors |= {s: tensors[s].rows(order) for s in sources if s in tensors}
    return config, [planned_ids(ids), *plan_tensors(source, config, head.names, tensors, dtype)]


def planned_ids(ids: Tensor) -> Planned:
    """Plan the tensor `draft_ids` of a head."""
    return Planned("draft_ids", tuple(ids.shape), torch.int64, [Entry(ids.shape, ids.dtype, lambda: ids)])


def _equals_target(entry: Entry, target: Path, name: str) -> bool:
    """Return whether a head's matrix equals tensor `name` of the target in either of their dtypes."""
    with open_safetensors(target / WEIGHTS, "convert the target again") as file:
        if tuple(file.get_slice(name).get_shape()) != entry.shape:
            return False
        matrix = file.get_tensor(name)
    own = entry.read()  # may be a bfloat16 copy of a float32 matrix
    return torch.equal(own.to(matrix.dtype), matrix) or torch.equal(own, matrix.to(own.dtype))


def _draft_ids(path: Path, maps: dict[str, Entry], draft_vocab: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return target ids of the draft ids, ascending, and their rows in the file, both [Vd] int64.

    Source: `d2t` (offsets), `token_map` (vLLM: ids) or `t2d` (mask over target ids), in this order. `t2d`
    must agree with the others. Raises InputError.
    """
    indices = torch.arange(draft_vocab)
    if "d2t" in maps:
        ids = indices + maps["d2t"].read()
    elif "token_map" in maps:
        ids = maps["token_map"].read().long()
    elif "t2d" in maps:
        ids = maps["t2d"].read().bool().nonzero()[:, 0]
    else:
        ids = indices
    ids, order = ids.sort()
    if len(ids) != draft_vocab or (not maps and draft_vocab != vocab):
        raise InputError(f"{path}: no tensor d2t, token_map or t2d maps the {draft_vocab} draft ids")
    if ids[0] < 0 or ids[-1] >= vocab or bool((ids.diff() == 0).any()):
        raise InputError(f"{path}: {next(iter(maps))} has duplicate ids, or ids outside the target's"
                         f" vocabulary 0..{vocab - 1}")
    if "t2d" in maps and not torch.equal(maps["t2d"].read().bool().nonzero()[:, 0], ids):
        raise InputError(f"{path}: t2d and {next(iter(maps))} contradict each other")
    return ids, order


def plan_tensors(
    source: Source, config: dict, names: NameTable, tensors: dict[str, Entry], dtype: torch.dtype | None,
    stacks: dict = STACKS,
) -> list[Planned]:
    """Plan the tensors of a converted module: match its state dict with the source tensors, both ways.

    Raises InputError naming the first tensor that does not match.
    """
    path, args = source.path, _args(source, config)
    tensors = {name: entry for name, entry in tensors.items() if not IGNORED.search(name)}
    parts = {
        name: (tensor, parts_of(names, args, name, tuple(tensor.shape), stacks))
        for name, tensor in build_module(config).state_dict().items() if name != "draft_ids"
    }
    expected = {source: shape for _, sources in parts.values() for source, shape in sources.items()}
    uint8_names = {s for tensor, sources in parts.values() if tensor.dtype == torch.uint8 for s in sources}
    check_shapes({name: entry.shape for name, entry in tensors.items()}, expected, str(path))
    for name, entry in tensors.items():
        stored = entry.dtype
        fits = stored == torch.uint8 if name in uint8_names else stored and stored.is_floating_point
        if not fits or (stored.itemsize == 1 and name not in uint8_names):
            raise InputError(f"{path}: tensor {name!r} is not stored as floating point (a quantized"
                             " checkpoint?)")
    dtype = dtype or _prevailing_dtype({n: entry for n, entry in tensors.items() if n not in uint8_names})
    return [
        Planned(name, tuple(tensor.shape), torch.uint8 if tensor.dtype == torch.uint8 else dtype,
                [tensors[s] for s in sources], tuple(sources))
        for name, (tensor, sources) in parts.items()
    ]


def _args(source: Source, config: dict) -> ModelArgs:
    """Return the `ModelArgs` of a config. Raises InputError that names the source."""
    with named(source.path / CONFIG if source.path.is_dir() else source.path):
        return check_config(config)


def _prevailing_dtype(tensors: dict[str, Entry]) -> torch.dtype:
    """Return the dtype of most weights: a converted model has one dtype."""
    counts = Counter()
    for entry in tensors.values():
        counts[entry.dtype] += math.prod(entry.shape)
    dtype = max(counts, key=counts.get)
    return torch.float32 if dtype == torch.float64 else dtype
