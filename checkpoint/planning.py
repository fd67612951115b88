"""Planning a conversion: which source tensors each tensor of ours is made of, and the config of the result.

Every tensor is accounted for, in both directions, before the first byte is written.
"""
from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.folder import check_config, read_config
from checkpoint.head_layouts import Answers, read_layout
from checkpoint.layout import NameTable
from checkpoint.loading import build_module, check_head_fits
from checkpoint.names import CONFIG, WEIGHTS, is_gguf
from checkpoint.source import Entry, Source
from checkpoint.target_families import family_of, target_fields
from checkpoint.weights import check_shapes, opened
from checkpoint.writer import Planned
from common.errors import InputError, printable
from common.schema import Wrong
from model import ModelArgs

# Buffers that old checkpoints carry and that follow from the config.
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.masked_bias$")

LAYER = re.compile(r"(?<![^.])(?:layers|blk)\.[0-9]{1,9}(?=\.)|(?<![^.])midlayer(?=\.)")
# Our keys: Hugging Face's.
SOURCE_KEYS = {
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps", "rope_base": "rope_theta",
    "max_seq_len": "max_position_embeddings", "tie_embeddings": "tie_word_embeddings", "block": "block_size",
    "mask_id": "mask_token_id", "experts_per_token": "num_experts_per_tok", "bos_id": "bos_token_id",
}

Plan = tuple[dict, list[Planned]]  # (config, tensors to write)


def plan_target(source: Source, dtype: torch.dtype | None) -> Plan:
    """The config of a converted target, and its tensors.

    dtype: what to store them in; None is what most of the source's numbers are stored in. Raises InputError
    on a config or a tensor that does not fit.
    """
    names = family_of(source).names
    fields = target_fields(source)
    stop_ids = [i for i in source.stop_ids if i < fields["vocab_size"]]
    config = {"kind": "target", **fields, "stop_ids": stop_ids, "bos_id": source.bos_id}
    tensors = dict(source.tensors)
    name = names["lm_head.weight"][0]
    if config["tie_embeddings"] and name in tensors:
        # Some files hold the tied matrix twice. transformers 4 ignores the second copy and transformers 5
        # uses it, so it may be dropped only if both are equal.
        copy, embed = tensors.pop(name), tensors.get(names["embed.weight"][0])
        if embed is None or copy.shape != embed.shape or not torch.equal(copy.read(), embed.read()):
            raise InputError(
                f"{source.path}: tie_word_embeddings is true, yet there is an {name} that differs from the"
                " embedding; set it to false in config.json if that tensor is meant"
            )
    return config, _plan(source, config, names, tensors, dtype)


def plan_head(source: Source, target: Path, dtype: torch.dtype | None, answers: Answers) -> Plan:
    """The config of a converted head of the converted target `target`, and its tensors.

    dtype: as for `plan_target`. Raises InputError on a config or a tensor that does not fit, and if the head
    does not fit the target.
    """
    path, target_args = source.path, check_config(read_config(target, "target"))
    layout = read_layout(source, target_args, answers)
    config, names, tensors = dict(layout.config), layout.names, dict(layout.tensors)
    embed, lm_head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    config["own_embedding"] = embed is not None and not _is_targets(embed, target, "embed.weight")
    if embed is not None and not config["own_embedding"]:
        del tensors["embed_tokens.weight"]
    target_lm_head = "embed.weight" if target_args.tie_embeddings else "lm_head.weight"
    shares = config["kind"] in ("eagle", "dflash", "dspark")
    if lm_head is not None and shares and _is_targets(lm_head, target, target_lm_head):
        config["own_lm_head"] = False  # vLLM's copies carry the target's
        del tensors["lm_head.weight"]
    check_head_fits(_checked(source, config, tensors), target_args, str(path))
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    plan = _plan(source, config, names, tensors, dtype)
    ids = config.pop("draft_ids", None)
    if ids is None:
        ids = _draft_ids(path, maps, config["draft_vocab_size"], config["vocab_size"])
    entry = Entry.of(ids.shape, ids.dtype, lambda: ids)
    return config, [Planned("draft_ids", entry.shape, torch.int64, [entry]), *plan]


def _is_targets(entry: Entry, target: Path, name: str) -> bool:
    """Whether a head's matrix is this tensor of the target, bit for bit in either's dtype."""
    with opened(target / WEIGHTS, "convert the target again") as file:
        if tuple(file.get_slice(name).get_shape()) != entry.shape:
            return False
        matrix = file.get_tensor(name)
    own = entry.read()  # which may be a copy in bfloat16 of what the target has in float32
    if not own.is_floating_point():
        return False
    return torch.equal(own.to(matrix.dtype), matrix) or torch.equal(own, matrix.to(own.dtype))


def _draft_ids(path: Path, maps: dict[str, Entry], draft_vocab: int, vocab: int) -> Tensor:
    """Target id of each draft id, [Vd] int64.

    They come from the offsets `d2t` or from `t2d`, the mask of the same ids. If both are there, they must
    agree.
    """
    marked = None
    if "t2d" in maps:
        check_shapes({"t2d": maps["t2d"].shape}, {"t2d": (vocab,)}, str(path))
        marked = maps["t2d"].read().bool().nonzero()[:, 0]
    ids = torch.arange(draft_vocab)
    if "d2t" in maps:
        check_shapes({"d2t": maps["d2t"].shape}, {"d2t": (draft_vocab,)}, str(path))
        ids = ids + maps["d2t"].read().to(torch.int64)
    elif marked is not None:
        ids = marked
        if len(ids) != draft_vocab:
            raise InputError(f"{path}: t2d marks {len(ids)} ids, the draft vocabulary has {draft_vocab}")
    elif draft_vocab != vocab:
        raise InputError(
            f"{path}: tensor d2t is missing, which maps the {draft_vocab} draft ids to {vocab} ids"
        )
    if ids[0] < 0 or ids[-1] >= vocab or bool((ids.diff() <= 0).any()):
        raise InputError(f"{path}: d2t does not give ascending ids of the target's vocabulary 0..{vocab - 1}")
    if marked is not None and not torch.equal(marked, ids):
        raise InputError(f"{path}: t2d and d2t contradict each other")
    return ids


def _plan(
    source: Source, config: dict, names: NameTable, tensors: dict[str, Entry], dtype: torch.dtype | None
) -> list[Planned]:
    """Match every tensor of the model with its sources, in both directions.

    Raises InputError naming the first tensor that does not match.
    """
    path, _ = source.path, _checked(source, config, tensors)
    module = build_module(config)
    tensors = {name: entry for name, entry in tensors.items() if not IGNORED.search(name)}
    expected: dict[str, tuple[int, ...]] = {}
    plan: list[tuple[str, tuple[int, ...], list[str]]] = []
    for name, tensor in module.state_dict().items():
        if name == "draft_ids":
            continue
        number = re.search(r"(?<=^layers\.)\d+", name)
        patterns = names[name] if name in names else names[re.sub(r"^layers\.\d+", "layers.{i}", name)]
        experts = range(tensor.shape[0]) if tensor.ndim == 3 else (None,)
        sources = [pattern.format(i=number and number[0], e=e) for e in experts for pattern in patterns]
        plan.append((name, tuple(tensor.shape), sources))
        rows = _row_counts(module.args, name, tensor.shape[-2] if tensor.ndim > 1 else tensor.shape[0])
        columns = tensor.shape[-1:] if tensor.ndim > 1 else ()
        for part, count in zip(sources, rows * len(experts), strict=True):
            expected[part] = (count, *columns)
    check_shapes({name: entry.shape for name, entry in tensors.items()}, expected, str(path))
    for name, entry in tensors.items():
        if entry.dtype is None or not entry.dtype.is_floating_point:
            raise InputError(
                f"{path}: tensor {printable(name)} is not stored as floating point (a quantised checkpoint?)"
            )
    dtype = dtype or _prevailing_dtype(tensors)
    return [
        Planned(name, shape, dtype, [tensors[s] for s in sources], tuple(sources))
        for name, shape, sources in plan
    ]


def _checked(source: Source, config: dict, tensors: dict[str, Entry]) -> ModelArgs:
    """What a config says of its model, once its keys are right and its layers no more than the source has.

    Raises InputError, which names the source's key.
    """
    try:
        args = check_config(config)
        layers = {match[0] for match in map(LAYER.search, tensors) if match}
        if config["kind"] not in ("medusa", "hydra") and args.num_layers > max(1, len(layers)):
            raise Wrong("num_layers", args.num_layers, f"at most {len(layers)}, the layers among the tensors")
    except Wrong as e:
        first, dot, rest = e.key.partition(".")
        key = SOURCE_KEYS.get(first, first)
        where = source.path if is_gguf(source.path) else source.path / CONFIG
        raise InputError(f"{where}: {e.of(source.keys.get(key, key) + dot + rest)}") from None
    return args


def _row_counts(args: ModelArgs, name: str, rows: int) -> tuple[int, ...]:
    """How the rows of one of our tensors (of one expert) divide among its sources."""
    if ".wqkv." in f".{name}":
        key_rows = args.num_kv_heads * args.head_dim
        return args.num_heads * args.head_dim, key_rows, key_rows
    if ".w_gate_up" in name:
        return args.intermediate_size, args.intermediate_size
    return (rows,)


def _prevailing_dtype(tensors: dict[str, Entry]) -> torch.dtype:
    """What most numbers are stored in. A model computes in one type, and the config may name another."""
    counts: dict[torch.dtype, int] = {}
    for entry in tensors.values():
        counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    dtype = max(counts, key=counts.get)
    return torch.float32 if dtype == torch.float64 else dtype
