"""Shared by several layouts of draft heads."""
from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path

from checkpoint.dense import NameTable, RecordedConfig
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs


@dataclass(frozen=True)
class HeadOptions:
    """Settings of a head that its files may leave open (flags of convert_checkpoint.py)."""

    aux_layers: tuple[int, ...] | None = None  # --aux-layers: target layers whose inputs feed the head
    norm_before_residual: bool | None = None  # --[no-]norm-before-residual
    recycle: str | None = None  # --recycle normed|raw


@dataclass(frozen=True)
class ReadHead:
    """A head as read from its source.

    config: the config.json that it becomes. names: the table of its tensors. tensors: the source's, under the
    names of that table, and `d2t`, `t2d` or `token_map`.
    """

    config: dict
    names: NameTable
    tensors: dict[str, Entry]


def layer_flags(tensors: dict[str, Entry], first: str = "layers.0.") -> dict:
    """Return the fields that follow from the names of tensors: configs omit them, or are wrong.

    first: the prefix of the first layer.
    """
    return {
        "fc_bias": "fc.bias" in tensors, "qkv_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "qk_norm": f"{first}self_attn.q_norm.weight" in tensors,
    }


def draft_vocab_size(config: dict, tensors: dict[str, Entry], vocab_size: int) -> int:
    """Return the size of the draft vocabulary: the config's, the lm_head's, or the target's."""
    lm_head = tensors.get("lm_head.weight")
    return config.get("draft_vocab_size") or (lm_head.shape[0] if lm_head else vocab_size)


def flat_config(config: dict) -> RecordedConfig:
    """Return one flat config: speculators nests the layer's shape, old vLLM copies of EAGLE-1 everything,
    SGLang's heads what is of EAGLE or DFlash.
    """
    inner, eagle, dflash = (config.get(name) or {} for name in (
        "model" if "model" in config else "transformer_layer_config", "eagle_config", "dflash_config"))
    parts = [{k: v for k, v in part.items() if v is not None} for part in (inner, eagle, config, dflash)]
    # The inner vocabulary is the target's; the outer one may be the draft's.
    vocabulary = {k: v for k, v in parts[0].items() if k == "vocab_size"}
    return RecordedConfig(dict(ChainMap(vocabulary, *parts[::-1])))


def reject_last_layer(path: Path, key: str, inputs: list[int], target: ModelArgs) -> None:
    """Raise InputError if a head reads the output of the last layer. key: what its config says."""
    if max(inputs) >= target.num_layers:
        raise InputError(f"{path}: config: {key}: the output of the target's last layer is normed where"
                         " this head was trained, and not here; it is not supported")


def read_markov(source: Source, flags: dict, tensors: dict[str, Entry]) -> dict:
    """Return the fields of `networks.markov.MarkovArgs`, from the tensors. Raises InputError."""
    kind = str(flags.get("markov_head_type") or "vanilla")
    table = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    if table and kind not in ("vanilla", "gated"):
        raise InputError(f"{source.path}: a Markov head of type {kind!r} is not supported (vanilla and gated"
                         " are)")
    rank = table.shape[1] if table else 0
    width = confidence.shape[-1] if confidence else 0
    with_markov = flags.get("confidence_head_with_markov")
    return {
        "markov_rank": rank, "markov_gated": rank > 0 and kind == "gated",
        "confidence": confidence is not None,
        "confidence_reads_markov":
            width != flags.get("hidden_size") if with_markov is None else bool(with_markov),
    }
