"""Convert a checkpoint to our folder format: a target or a draft head.

The source is a Hugging Face folder, a hub repository (org/name) or a .gguf file. Every tensor is accounted
for, in both directions, before the first byte is written. Then one tensor at a time is read, cast and
appended: memory does not grow with the model.
"""
from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.families import SCALES, NameTable, family_of, mtp_names, parts_of, target_fields
from checkpoint.folder import (
    CONFIG,
    FORMAT,
    WEIGHTS,
    check_config,
    check_out,
    is_converted,
    is_gguf,
    read_config,
)
from checkpoint.gguf import open_gguf
from checkpoint.heads import kind_of, read_layout
from checkpoint.huggingface import open_folder
from checkpoint.layouts import Answers
from checkpoint.loading import build_module, check_head_fits
from checkpoint.medusa_layouts import target_inside
from checkpoint.source import Entry, Source, resolve_source, unique_ids
from checkpoint.weights import check_shapes, opened
from checkpoint.writer import Planned, fill
from common.cli import library_errors, note
from common.dtypes import DTYPES, short_dtype
from common.errors import InputError
from common.files import staging
from common.schema import named
from common.torchrun import several
from kernels.quantized import MXFP4, Scheme
from model import ModelArgs
from tokens.convert import find_template
from tokens.files import ENCODERS, MERGES
from tokens.tokenizer import Tokenizer

# Buffers that old checkpoints carry and that follow from the config.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")


def convert(
    checkpoint: str | Path, out: str | Path | None = None, target: str | Path | None = None, *,
    dtype: str = "keep", answers: Answers | None = None, template: str = "auto", force: bool = False,
    quiet: bool = False, allow_nonfinite: bool = False,
) -> Path:
    """Convert `checkpoint` into the folder `out` and return it. Its tensors tell targets from heads.

    out: for a target by default `default_folder(checkpoint)`, for a head TARGET/KIND, one of
    `extensions.HEADS`. target: the converted folder of the model that a head belongs to; needed for
    a head, which is checked to fit. dtype: keep, bf16, fp16, fp32 or PyTorch's name for it; keep is what most
    of the source's numbers are stored in, bf16 if quantised. answers: for a head, what its files leave open.
    template: for a target without chat template, the one to add; see `templates.find_template`. force:
    replace `out` if it is one of our folders of the same kind; folders inside it, such as heads, are kept.
    allow_nonfinite: accept nan and infinite weights, with a warning.

    Raises InputError with one line on any bad input or lack of space. Nothing is left on disk then.
    """
    path = resolve_source(checkpoint)
    source = open_gguf(path) if is_gguf(path) else open_folder(path)
    cast_to = None if dtype == "keep" else getattr(torch, DTYPES[short_dtype(dtype)])
    kind = kind_of(source)
    if target is None and (inside := target_inside(source)):  # with --target, its heads are converted
        kind, source = None, inside
    if bool(kind) != bool(target):
        what = "a draft head, which needs --target, its" if kind else "no draft head, which alone has a"
        raise InputError(f"{path}: is {what} converted target")
    if kind:
        out = Path(out or Path(target) / kind)
        parts = {"": plan_head(source, Path(target), cast_to, answers or Answers())}
    else:
        out = Path(out or default_folder(checkpoint))
        parts = plan_target(source, cast_to)
    name, (config, plan) = _name(checkpoint), parts[""]
    check_out(out, config["kind"], force)
    added = find_template(template, name, str(checkpoint), str(source.config.get("_name_or_path", "")))

    with staging(out) as folder:
        tokenizer = Tokenizer.load(folder) if not kind and source.tokenizer(folder, added=added) else None
        if tokenizer:
            ends = unique_ids(config["stop_ids"], tokenizer.stop_ids)
            config["stop_ids"] = [i for i in ends if i < config["vocab_size"]]
        if tokenizer and added and (template != "auto" or not tokenizer.has_template):
            (folder / "chat_template.jinja").write_text(added, encoding="utf-8")
            (folder / "tool_use.jinja").unlink(missing_ok=True)  # the chosen one is for tools too
        for part, (fields, tensors) in parts.items():
            fields = {"format": FORMAT, "name": name, "source": origin(checkpoint)} | fields
            fill(folder / part, fields, tensors, quiet=quiet, allow_nonfinite=allow_nonfinite,
                 where=str(source.path))
    if not kind:
        _warn(checkpoint, tokenizer, config)
    if not quiet:
        print(f"wrote {out}: {config['kind']}, {sum(t.nbytes for t in plan):,} bytes of weights")
    return out


def _warn(checkpoint: str | Path, tokenizer: Tokenizer | None, config: dict) -> None:
    """Print what a converted target lacks."""
    if tokenizer is None:
        note(f"warning: {checkpoint} has no tokenizer files ({', '.join(ENCODERS)} with {MERGES}); run it"
             " with --prompt-ids")
    elif tokenizer.vocab_size > config["vocab_size"]:
        note(f"warning: {checkpoint}: its tokenizer has {tokenizer.vocab_size:,} ids, the model"
             f" {config['vocab_size']:,}; prompts with others are refused")
    if not config["stop_ids"]:
        note(f"warning: {checkpoint} names no end token; texts end at --max-new-tokens only")


def default_folder(checkpoint: str | Path) -> Path:
    """Return where a target is written without --out: checkpoints/NAME, in lower case."""
    return Path("checkpoints") / _name(checkpoint).lower()


def converted_folder(
    checkpoint: str | Path, say: Callable[[str], None], target: str | Path | None = None
) -> str:
    """Return the converted folder of any checkpoint: itself, or checkpoints/NAME, of a head TARGET/NAME.

    The latter is written now if it is missing or older than the checkpoint. target: the converted folder of
    the model that a head belongs to. Raises InputError if another checkpoint of the same name has been
    converted there, and in one of several processes, which would all write one folder.
    """
    checkpoint = str(checkpoint)
    if several() or is_converted(checkpoint):
        read_config(checkpoint)
        return checkpoint
    out, path = default_folder(checkpoint), Path(checkpoint)
    out, stale = Path(target) / out.name if target else out, False
    if out.is_dir():
        other = read_config(out).get("source")
        if other != origin(checkpoint):
            raise InputError(f"{out}: was converted from {other}; convert {checkpoint} with"
                             " convert_checkpoint.py --out, into another folder, and name that")
        files = path.iterdir() if path.is_dir() else [path]
        written = (out / WEIGHTS).stat().st_mtime
        stale = any(f.stat().st_mtime > written for f in files if f.is_file())
    if stale or not out.is_dir():
        resolve_source(checkpoint)
        say(f"converting {checkpoint} into {out}")
        with contextlib.redirect_stdout(sys.stderr), library_errors(f"{checkpoint}: malformed"):
            convert(checkpoint, out, target, force=stale)  # stdout is for the answer
    return str(out)


def origin(checkpoint: str | Path) -> str:
    """Return the `source` in a converted folder's config: an absolute path, or the hub id."""
    return str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else str(checkpoint)


def _name(checkpoint: str | Path) -> str:
    path = Path(checkpoint)
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else path.name


def plan_target(source: Source, dtype: torch.dtype | None) -> dict[str, tuple[dict, list[Planned]]]:
    """Return the config of a converted target and its tensors, under "", and those of its MTP layer, if any.

    dtype: what to store them in; None is what most of the source's numbers are stored in. Raises InputError
    on a config or a tensor that does not fit.
    """
    family, fields = family_of(source.path, source.family), target_fields(source)
    names = family.names
    stop_ids = [i for i in source.stop_ids if i < fields["vocab_size"]]
    config = {"kind": "target", **fields, "stop_ids": stop_ids, "bos_id": source.bos_id}
    tensors = family.rearranged(source, fields)
    extra = {n: tensors.pop(n) for n in [*tensors] if family.hybrid and n.startswith("mtp.")}
    if SCALES in tensors:
        config["quantization"] = Scheme(None, 0, None, MXFP4).written()
    name = names["lm_head.weight"][0]
    if config["tie_embeddings"] and name in tensors:
        # Some files hold the tied matrix twice. transformers 4 ignores the second copy and transformers 5
        # uses it, so it may be dropped only if both are equal.
        copy, embed = tensors.pop(name), tensors.get(names["embed.weight"][0])
        if embed is None or copy.shape != embed.shape or not torch.equal(copy.read(), embed.read()):
            raise InputError(f"{source.path}: tie_word_embeddings is true, yet there is an {name} that"
                             " differs from the embedding; set it to false in config.json if that tensor is"
                             " meant")
    plan = _plan(source, config, names, tensors, dtype)
    mtp = _plan_mtp(source, config, mtp_names(names), extra, plan[0].dtype) if extra else {}
    return {"": (config, plan)} | mtp


def _plan_mtp(
    source: Source, target: dict, names: NameTable, tensors: dict[str, Entry], dtype: torch.dtype
) -> dict[str, tuple[dict, list[Planned]]]:
    """Return what `plan_target` has of the MTP layer of a target of this config.

    Nothing, and prints why, if it is another than we know.
    """
    config = {k: v for k, v in target.items() if not k.startswith(("delta_", "stop_ids", "bos_id"))} | {
        "kind": "mtp", "num_layers": 1, "delta_layers": [0], "target_hidden_size": target["hidden_size"],
        "draft_vocab_size": target["vocab_size"], "aux_layers": [target["num_layers"]],
        "own_embedding": False, "own_lm_head": False, "tie_embeddings": False,
    }
    try:
        plan = _plan(source, config, names, tensors, dtype)
    except InputError as e:
        note(f"warning: the MTP layer is left out: {e}")
        return {}
    return {"mtp": (config, [_planned_ids(torch.arange(target["vocab_size"])), *plan])}


def _planned_ids(ids: Tensor) -> Planned:
    return Planned("draft_ids", tuple(ids.shape), torch.int64, [Entry.of(ids.shape, ids.dtype, lambda: ids)])


def plan_head(
    source: Source, target: Path, dtype: torch.dtype | None, answers: Answers
) -> tuple[dict, list[Planned]]:
    """Return the config of a converted head of the converted target `target`, and its tensors.

    dtype: as for `plan_target`. Raises InputError on a config or a tensor that does not fit, and if the head
    does not fit the target.
    """
    path, target_args = source.path, check_config(read_config(target, "target"))
    layout = read_layout(source, target_args, answers)
    config, tensors = dict(layout.config), dict(layout.tensors)
    embed, lm_head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    config["own_embedding"] = embed is not None and not _is_targets(embed, target, "embed.weight")
    if embed is not None and not config["own_embedding"]:
        del tensors["embed_tokens.weight"]
    target_lm_head = "embed.weight" if target_args.tie_embeddings else "lm_head.weight"
    if lm_head is not None and config["draft_vocab_size"] == target_args.vocab_size and _is_targets(
        lm_head, target, target_lm_head
    ):
        config["own_lm_head"] = False  # vLLM's copies of heads carry the target's
        del tensors["lm_head.weight"]
    check_head_fits(_args(source, config), target_args, str(path))
    maps = {name: tensors.pop(name) for name in ("d2t", "token_map", "t2d") if name in tensors}
    ids, order = _draft_ids(path, maps, config["draft_vocab_size"], config["vocab_size"])
    for name, sources in layout.names.items():
        if name.startswith(("lm_head", "markov_out.")):  # they have a row for each draft id
            tensors |= {s: tensors[s].changed(lambda x: x[order]) for s in sources if s in tensors}
    return config, [_planned_ids(ids), *_plan(source, config, layout.names, tensors, dtype)]


def _is_targets(entry: Entry, target: Path, name: str) -> bool:
    """Return whether a head's matrix is this tensor of the target, bit for bit in either's dtype."""
    with opened(target / WEIGHTS, "convert the target again") as file:
        if tuple(file.get_slice(name).get_shape()) != entry.shape:
            return False
        matrix = file.get_tensor(name)
    own = entry.read()  # which may be a copy in bfloat16 of what the target has in float32
    if not own.is_floating_point():
        return False
    return torch.equal(own.to(matrix.dtype), matrix) or torch.equal(own, matrix.to(own.dtype))


def _draft_ids(path: Path, maps: dict[str, Entry], draft_vocab: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the target id of each draft id in ascending order, and the file's place of each: [Vd] int64.

    They come from the offsets `d2t`, from `token_map` (vLLM's, the ids), or from `t2d`, the mask of the same
    ids. If `t2d` is beside one of the others, they must agree.
    """
    places = torch.arange(draft_vocab)
    if "d2t" in maps:
        ids = places + maps["d2t"].read()
    elif "token_map" in maps:
        ids = maps["token_map"].read().long()
    elif "t2d" in maps:
        ids = maps["t2d"].read().bool().nonzero()[:, 0]
    else:
        ids = places
    ids, order = ids.sort()
    if len(ids) != draft_vocab or (not maps and draft_vocab != vocab):
        raise InputError(f"{path}: no tensor d2t, token_map or t2d maps the {draft_vocab} draft ids")
    if ids[0] < 0 or ids[-1] >= vocab or bool((ids.diff() == 0).any()):
        raise InputError(f"{path}: {next(iter(maps))} gives ids twice, or outside the target's vocabulary"
                         f" 0..{vocab - 1}")
    if "t2d" in maps and not torch.equal(maps["t2d"].read().bool().nonzero()[:, 0], ids):
        raise InputError(f"{path}: t2d and {next(iter(maps))} contradict each other")
    return ids, order


def _plan(
    source: Source, config: dict, names: NameTable, tensors: dict[str, Entry], dtype: torch.dtype | None
) -> list[Planned]:
    """Match every tensor of the model with its sources, in both directions.

    Raises InputError naming the first tensor that does not match.
    """
    path, args = source.path, _args(source, config)
    tensors = {name: entry for name, entry in tensors.items() if not IGNORED.search(name)}
    parts = {
        name: (tensor, parts_of(names, args, name, tuple(tensor.shape)))
        for name, tensor in build_module(config).state_dict().items() if name != "draft_ids"
    }
    expected = {source: shape for _, sources in parts.values() for source, shape in sources.items()}
    in_bytes = {s for tensor, sources in parts.values() if tensor.dtype == torch.uint8 for s in sources}
    check_shapes({name: entry.shape for name, entry in tensors.items()}, expected, str(path))
    for name, entry in tensors.items():
        fits = entry.dtype is not None and entry.dtype.is_floating_point
        if not (entry.dtype == torch.uint8 if name in in_bytes else fits):
            raise InputError(f"{path}: tensor {name!r} is not stored as floating point (a quantised"
                             " checkpoint?)")
    dtype = dtype or _prevailing_dtype({n: entry for n, entry in tensors.items() if n not in in_bytes})
    return [
        Planned(name, tuple(tensor.shape), torch.uint8 if tensor.dtype == torch.uint8 else dtype,
                [tensors[s] for s in sources], tuple(sources))
        for name, (tensor, sources) in parts.items()
    ]


def _args(source: Source, config: dict) -> ModelArgs:
    """Return the model's shape in a config. Raises InputError, which names the source."""
    with named(source.path if is_gguf(source.path) else source.path / CONFIG):
        return check_config(config)


def _prevailing_dtype(tensors: dict[str, Entry]) -> torch.dtype:
    """Return the dtype that most numbers are stored in: a model computes in one dtype."""
    counts = Counter()
    for entry in tensors.values():
        counts[entry.dtype] += math.prod(entry.shape)
    dtype = max(counts, key=counts.get)
    return torch.float32 if dtype == torch.float64 else dtype
