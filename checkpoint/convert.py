"""Converting a checkpoint to our folder format: a target or a draft head (EAGLE, Medusa, Hydra).

The source is a Hugging Face folder, a hub repository (org/name) or a .gguf file. Every tensor is accounted
for before the first byte is written. Then one tensor at a time is read, cast and appended: memory does not
grow with the model.
"""
from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.folder import CONFIG, FORMAT, WEIGHTS, check_keys, read_config
from checkpoint.head_layouts import Answers, kind_of, read_layout
from checkpoint.loading import build_module, check_head_fits
from checkpoint.opening import open_source, resolve_source
from checkpoint.source import Entry, Source, is_gguf
from checkpoint.target_families import family_of, target_fields
from checkpoint.writer import Planned, check_out, write_folder
from common.dtypes import DTYPES
from common.errors import InputError
from model import ModelArgs
from tokens.templates import find_template
from tokens.tokenizer import Tokenizer

# Buffers that old checkpoints carry and that follow from the config.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")

OUTPUT_DTYPES = {short: getattr(torch, name) for short, name in DTYPES.items()}


def convert(
    source: str | Path,
    out: str | Path | None = None,
    target: str | Path | None = None,
    dtype: str = "keep",
    answers: Answers | None = None,
    template: str = "auto",
    force: bool = False,
    quiet: bool = False,
) -> Path:
    """Convert `source` into the folder `out` and return it. Targets and heads are told apart by their
    contents.

    out: for a target by default `default_folder(source)`, for a head TARGET/KIND: eagle3, eagle (EAGLE-1/2),
    medusa or hydra. target: the converted folder of the model a head belongs to; needed for a head, since it
    is checked to fit. dtype: keep, bf16, fp16 or fp32; keep is what most of the source's numbers are stored
    in, bf16 if quantised. answers: for a head, what its files leave open. template: for a target without chat
    template, the one to add; see templates.find_template. force: replace `out` if it is one of our folders of
    the same kind; folders inside it, such as heads, are kept. Raises InputError with one line on any bad
    input or lack of space; nothing is left behind then.
    """
    started = time.perf_counter()
    opened = open_source(resolve_source(source))
    if dtype not in ("keep", *OUTPUT_DTYPES):
        raise InputError(f"dtype {dtype!r} is not one of keep, {', '.join(OUTPUT_DTYPES)}")
    kind = kind_of(opened)
    if kind == "medusa" and target is None and any(
        name.startswith("model.layers.") for name in opened.tensors
    ):
        # A Medusa-2 model carries its heads; they are converted by the same command with --target.
        kind = None
        opened = replace(
            opened, tensors={n: t for n, t in opened.tensors.items() if not n.startswith("medusa_head.")}
        )
    if kind and target is None:
        raise InputError(
            f"{opened.path}: is a draft head and needs --target DIR, the converted model it is for"
        )
    if kind:
        out = Path(out or Path(target) / kind)
        config, plan = _plan_head(opened, Path(target), dtype, answers or Answers())
    else:
        out = Path(out or default_folder(source))
        config, plan = _plan_target(opened, dtype)
    if out.is_symlink():
        out = out.resolve()  # replace what the link points to, not the link
    config = {"format": FORMAT, "name": _name(source), "source": origin(source), **config}
    check_out(out, config["kind"], force)
    added = find_template(template, config["name"], str(source), str(opened.config.get("_name_or_path", "")))

    def tokenizer(folder: Path) -> bool:
        """Write the tokenizer's files, and the template if it is asked for or missing."""
        there = opened.tokenizer(folder)
        if there and added and (template != "auto" or not Tokenizer.load(folder).has_template):
            (folder / "chat_template.jinja").write_text(added, encoding="utf-8")
        return there

    has_tokenizer = write_folder(out, config, plan, None if kind else tokenizer, quiet)
    if not has_tokenizer:
        print(f"warning: {source} has no tokenizer files; run it with --prompt-ids", file=sys.stderr)
    if not config.get("stop_ids", True):
        print(f"warning: {source} names no end token; texts end at --max-new-tokens only", file=sys.stderr)
    if not quiet:
        params = sum(math.prod(t.shape) for t in plan if t.dtype.is_floating_point)
        size = sum(t.nbytes for t in plan)
        seconds = time.perf_counter() - started
        print(f"wrote {out}: {config['kind']}, {params:,} parameters, {size:,} bytes, {seconds:.1f} s")
    return out


def default_folder(source: str | Path) -> Path:
    """Where a target is written unless --out says otherwise: checkpoints/NAME, in lower case."""
    return Path("checkpoints") / _name(source).lower()


def converted_folder(source: str, say: Callable[[str], None]) -> str:
    """The converted folder of any source: itself, or checkpoints/NAME, converted now unless that is up to
    date.

    Raises InputError if another source of the same name has been converted there.
    """
    try:
        read_config(source)
        return source
    except InputError:
        config = Path(source, CONFIG)
        if config.is_file() and '"format"' in config.read_text(errors="replace"):
            raise  # ours, but of another version or damaged
    out, path = default_folder(source), Path(source)
    stale = False
    if out.is_dir():
        other = read_config(out).get("source")
        if other != origin(source):
            raise InputError(
                f"{out}: was converted from {other}; convert {source} with convert_checkpoint.py --out DIR and use DIR"
            )
        files = [path] if path.is_file() else [
            f for f in path.iterdir() if f.is_file()
        ] if path.is_dir() else []
        stale = any(f.stat().st_mtime > (out / WEIGHTS).stat().st_mtime for f in files)
    if stale or not out.is_dir():
        say(f"converting {source} into {out}")
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer
            convert(source, out, force=stale)
    return str(out)


def origin(source: str | Path) -> str:
    """What a converted folder's config says it came from: an absolute path, or the hub id."""
    return str(Path(source).resolve()) if Path(source).exists() else str(source)


def _name(source: str | Path) -> str:
    path = Path(source)
    return path.stem if is_gguf(path) else path.name if not path.is_dir() else path.resolve().name


# What will be written


def _plan_target(source: Source, dtype: str) -> tuple[dict, list[Planned]]:
    names = family_of(source).names
    config = {
        "kind": "target",
        **target_fields(source),
        "stop_ids": [i for i in source.stop_ids if i < source.config["vocab_size"]],
        "bos_id": source.bos_id,
    }
    tensors = dict(source.tensors)
    if config["tie_embeddings"] and names["lm_head.weight"][0] in tensors:
        # Some files spell the tied matrix out. transformers 4 ignores the second copy, 5 uses it: only safe
        # if equal.
        copy, embed = tensors.pop(names["lm_head.weight"][0]), tensors.get(names["embed.weight"][0])
        if embed is None or copy.shape != embed.shape or not torch.equal(copy.read(), embed.read()):
            raise InputError(
                f"{source.path}: tie_word_embeddings is true, yet there is an {names['lm_head.weight'][0]} that differs"
                " from the embedding; set it to false in config.json if that tensor is meant"
            )
    return config, _plan(source.path, config, names, tensors, dtype)


def _plan_head(source: Source, target: Path, dtype: str, answers: Answers) -> tuple[dict, list[Planned]]:
    path, target_config = source.path, read_config(target, "target")
    target_args = build_module(target_config).args
    layout = read_layout(source, target_args, answers)
    config, names, tensors = dict(layout.config), layout.names, dict(layout.tensors)
    theirs = {
        "embed": "embed.weight", "lm_head": "embed.weight" if target_args.tie_embeddings else "lm_head.weight"
    }
    embed, lm_head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    config["own_embedding"] = embed is not None and not _same_as_target(embed, target, theirs["embed"])
    if embed is not None and not config["own_embedding"]:
        del tensors["embed_tokens.weight"]
    if lm_head is not None and config["kind"] == "eagle" and _same_as_target(
        lm_head, target, theirs["lm_head"]
    ):
        config["own_lm_head"] = False  # vLLM's copies carry the target's
        del tensors["lm_head.weight"]
    check_head_fits(config, target_args, str(path))
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    plan = _plan(path, config, names, tensors, dtype)
    ids = config.pop("draft_ids", None)
    if ids is None:
        ids = _draft_ids(path, maps, config["draft_vocab_size"], config["vocab_size"])
    entry = Entry(tuple(ids.shape), ids.dtype, lambda: iter((ids,)))
    return config, [Planned("draft_ids", entry.shape, torch.int64, [entry]), *plan]


def _same_as_target(entry: Entry, target: Path, name: str) -> bool:
    """Whether a head's matrix is the target's, bit for bit in the target's dtype."""
    try:
        with safe_open(target / WEIGHTS, framework="pt") as file:
            if tuple(file.get_slice(name).get_shape()) != entry.shape:
                return False
            theirs = file.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise InputError(f"{target / WEIGHTS}: damaged ({e}); convert the target again") from None
    return torch.equal(entry.read().to(theirs.dtype), theirs)


def _draft_ids(path: Path, maps: dict[str, Entry], draft_vocab: int, vocab: int) -> Tensor:
    """Target id of each draft id [Vd] int64, from the offsets `d2t`; `t2d`, the mask of the same ids, must
    agree.
    """
    ids = torch.arange(draft_vocab)
    if "d2t" in maps:
        check_keys({"d2t": maps["d2t"].shape}, {"d2t": (draft_vocab,)}, str(path))
        ids = ids + maps["d2t"].read().to(torch.int64)
    elif "t2d" in maps:
        ids = maps["t2d"].read().bool().nonzero()[:, 0]
        if len(ids) != draft_vocab:
            raise InputError(f"{path}: t2d marks {len(ids)} ids, the draft vocabulary has {draft_vocab}")
    elif draft_vocab != vocab:
        raise InputError(
            f"{path}: tensor d2t is missing, which maps the {draft_vocab} draft ids to {vocab} ids"
        )
    if ids[0] < 0 or ids[-1] >= vocab or bool((ids.diff() <= 0).any()):
        raise InputError(f"{path}: d2t does not give ascending ids of the target's vocabulary 0..{vocab - 1}")
    if "t2d" in maps:
        check_keys({"t2d": maps["t2d"].shape}, {"t2d": (vocab,)}, str(path))
        if not torch.equal(maps["t2d"].read().bool().nonzero()[:, 0], ids):
            raise InputError(f"{path}: t2d and d2t contradict each other")
    return ids


def _plan(path: Path, config: dict, names: dict, tensors: dict[str, Entry], dtype: str) -> list[Planned]:
    """Match every tensor of the model with its sources, both ways. Raises InputError naming the first odd
    one.
    """
    try:
        module = build_module(config)
    except InputError as e:
        raise InputError(f"{path}: {e}") from None
    tensors = {name: entry for name, entry in tensors.items() if not IGNORED.search(name)}
    wanted: dict[str, tuple[int, ...]] = {}
    plan: dict[str, tuple[tuple[int, ...], list[str]]] = {}
    for ours, tensor in module.state_dict().items():
        if ours == "draft_ids":
            continue
        number = re.search(r"(?<=^layers\.)\d+", ours)
        row = names[ours] if ours in names else names[re.sub(r"^layers\.\d+", "layers.{i}", ours)]
        experts = range(tensor.shape[0]) if tensor.ndim == 3 else (None,)
        theirs = [name.format(i=number and number[0], e=e) for e in experts for name in row]
        plan[ours] = tuple(tensor.shape), theirs
        rows = _row_counts(module.args, ours, tensor.shape[-2] if tensor.ndim > 1 else tensor.shape[0])
        inner = tensor.shape[-1:] if tensor.ndim > 1 else ()
        for name, count in zip(theirs, rows * len(experts), strict=True):
            wanted[name] = (count, *inner)
    check_keys({name: entry.shape for name, entry in tensors.items()}, wanted, str(path))
    for name, entry in tensors.items():
        if entry.dtype is None or not entry.dtype.is_floating_point:
            raise InputError(
                f"{path}: tensor {name} is not stored as floating point (a quantised checkpoint?)"
            )
    dtype = OUTPUT_DTYPES[dtype] if dtype in OUTPUT_DTYPES else _prevailing_dtype(tensors)
    return [
        Planned(ours, shape, dtype, [tensors[n] for n in theirs]) for ours, (shape, theirs) in plan.items()
    ]


def _row_counts(args: ModelArgs, name: str, rows: int) -> tuple[int, ...]:
    """How the rows of one of our tensors (of one expert) divide among its sources."""
    if ".wqkv." in f".{name}":
        return args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim, args.num_kv_heads * args.head_dim
    if ".w_gate_up" in name:
        return args.intermediate_size, args.intermediate_size
    return (rows,)


def _prevailing_dtype(tensors: dict[str, Entry]) -> torch.dtype:
    """What most numbers are stored in. A model computes in one type, and the config's may not be the file's.
    """
    counts: dict[torch.dtype, int] = {}
    for entry in tensors.values():
        counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    dtype = max(counts, key=counts.get)
    return torch.float32 if dtype == torch.float64 else dtype
