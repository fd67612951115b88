"""Shared by several layouts of draft heads."""
from __future__ import annotations

from pathlib import Path

from checkpoint.dense import NameTable
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs

MARKOV: NameTable = {
    "markov_in.weight": ["markov_head.markov_w1.weight"],
    "markov_out.weight": ["markov_head.markov_w2.weight"],
    "markov_gate.weight": ["markov_head.gate_proj.weight"],
    "markov_gate.bias": ["markov_head.gate_proj.bias"],
    "confidence.weight": ["confidence_head.proj.weight"],
    "confidence.bias": ["confidence_head.proj.bias"],
}


def flat_config(config: dict) -> dict:
    """Return one flat config: speculators nests the layer's shape, old vLLM copies of EAGLE-1 everything."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    outer = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "model")}
    merged = {k: v for k, v in (inner | outer).items() if v is not None}
    if inner:  # the inner vocabulary is the target's; the outer one may be the draft's
        merged["vocab_size"] = inner.get("vocab_size", merged.get("vocab_size"))
    return merged


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
