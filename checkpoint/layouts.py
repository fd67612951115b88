"""Shared parts of the layouts of draft heads: reading their configs, our weights under published names.

A layout is a table of names that is read in both directions. `checkpoint.heads` lists the kinds.
"""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from checkpoint.configs import ACTIVATIONS
from checkpoint.dense import KEYS, NameTable, parts_of
from checkpoint.source import Entry, Source
from common.errors import InputError
from head import Head
from model import ModelArgs
from networks.markov import MarkovArgs

MARKOV: NameTable = {
    "markov_in.weight": ["markov_head.markov_w1.weight"],
    "markov_out.weight": ["markov_head.markov_w2.weight"],
    "markov_gate.weight": ["markov_head.gate_proj.weight"],
    "markov_gate.bias": ["markov_head.gate_proj.bias"],
    "confidence.weight": ["confidence_head.proj.weight"],
    "confidence.bias": ["confidence_head.proj.bias"],
}


Published = tuple[dict, dict[str, Tensor]]  # a head as another program reads it: its config.json and tensors


def publish(head: Head, names: NameTable) -> dict[str, Tensor]:
    """Return a head's own weights under published names. Raises InputError on weights without one."""
    tensors = {}
    for name, tensor in head.own_state().items():
        if name == "draft_ids":
            continue
        try:
            parts = parts_of(names, head.args, name, tuple(tensor.shape))
        except KeyError:
            raise InputError(f"weights {name} of this head have no place in a layout written here") from None
        rows = [shape[0] for shape in parts.values()]
        tensors |= dict(zip(parts, tensor.split(rows)))
    return tensors


def vocabulary_map(head: Head) -> dict[str, Tensor]:
    """Return `d2t` (target id = draft id + d2t[draft id]) and `t2d`, which marks the drafts' target ids."""
    ids = head.draft_ids.cpu()
    marked = torch.zeros(head.args.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def llama_config(head: Head) -> dict:
    """Return the shape of a head's layers as transformers names it."""
    a = head.args
    shape = {key: getattr(a, name) for name, (key, _) in KEYS.items()}
    shape["hidden_act"] = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == a.activation)
    if a.windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in a.windows]
        shape |= {"use_sliding_window": True, "sliding_window": max(a.windows), "layer_types": kinds}
    if a.draft_window:
        shape["draft_window"] = a.draft_window
    return {"model_type": "llama", **shape, "torch_dtype": "bfloat16"}


def flat_config(config: dict) -> dict:
    """Return one flat config: speculators nests the layer's shape, old vLLM copies of EAGLE-1 everything."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    outer = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "model")}
    merged = {k: v for k, v in (inner | outer).items() if v is not None}
    if inner:  # the inner vocabulary is the target's; the outer one may be the draft's
        merged["vocab_size"] = inner.get("vocab_size", merged.get("vocab_size"))
    return merged


def refuse_last(path: Path, said: str, inputs: list[int], target: ModelArgs) -> None:
    """Raise InputError if one of these layers' inputs is the last layer's output. said: in the config."""
    if max(inputs) >= target.num_layers:
        raise InputError(f"{path}: config: {said}: the output of the target's last layer is normed where"
                         " this head was trained, and not here; it is not supported")


def read_markov(source: Source, flags: dict, tensors: dict[str, Entry]) -> dict:
    """Return the fields of `networks.markov.MarkovArgs`, from the tensors. Raises InputError."""
    kind = str(flags.get("markov_head_type") or "vanilla")
    table = tensors.get("markov_head.markov_w1.weight")
    reads = tensors.get("confidence_head.proj.weight")
    if table is not None and kind not in ("vanilla", "gated"):
        raise InputError(f"{source.path}: a Markov head of type {kind!r} is not supported (vanilla and gated"
                         " are)")
    rank = table.shape[1] if table is not None and len(table.shape) == 2 else 0
    width = reads.shape[-1] if reads is not None and reads.shape else 0
    with_markov = flags.get("confidence_head_with_markov")
    return {
        "markov_rank": rank, "markov_gated": rank > 0 and kind == "gated", "confidence": reads is not None,
        "confidence_reads_markov":
            width != flags.get("hidden_size") if with_markov is None else bool(with_markov),
    }


def write_markov(a: MarkovArgs) -> dict:
    """Return the config keys of a Markov and a confidence head."""
    return {
        "markov_rank": a.markov_rank, "markov_head_type": "gated" if a.markov_gated else "vanilla",
        "enable_confidence_head": a.confidence, "confidence_head_with_markov": a.confidence_reads_markov,
    }


def write_speculators(head: Head, kind: str, own: dict, target: dict) -> dict:
    """Return a config of the speculators library. own: keys of the kind. target: the target's config.json."""
    a, algorithm = head.args, kind.replace("-", "")
    proposal = {
        "proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0,
        "speculative_tokens": min(5, a.drafts or 5),  # a block head drafts no more
    }
    return {
        "speculators_model_type": algorithm,
        "draft_vocab_size": a.draft_vocab_size, "target_hidden_size": a.target_hidden_size, **own,
        "transformer_layer_config": llama_config(head),
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target.get("name"),
                # Targets converted before 2026-11-28 do not say.
                "architectures": [target["architecture"]] if "architecture" in target else [],
            },
        },
        "torch_dtype": "bfloat16",
    }
