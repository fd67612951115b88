"""The layouts of heads that draft blocks: DFlash (z-lab), DSpark (deepseek-ai/DeepSpec), and both as the
speculators library writes them.

Tensors: "fc.weight", "hidden_norm.weight", "norm.weight", "layers.{i}.*" as of Qwen3; DSpark adds
"markov_head.markov_w1|markov_w2|gate_proj", "confidence_head.proj" and copies of the target's embedding and
lm_head. Configs number layers by their outputs (`target_layer_ids`), speculators by their inputs
(`aux_hidden_state_layer_ids`).
"""
from __future__ import annotations

from pathlib import Path

from checkpoint.layout import Layout, NameTable
from checkpoint.source import Entry, Source
from checkpoint.target_families import ATTENTION, DENSE, model_fields, with_prefix
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
BLOCK: NameTable = {
    "embed.weight": ["embed_tokens.weight"], "lm_head.weight": ["lm_head.weight"], "fc.weight": ["fc.weight"],
    "fc.bias": ["fc.bias"], "hidden_norm.weight": ["hidden_norm.weight"], "norm.weight": ["norm.weight"],
    **MARKOV,
    **with_prefix(
        ATTENTION | DENSE | {"attn_norm.weight": ["input_layernorm.weight"]}, "layers.{i}.", "layers.{i}."
    ),
}
# Copies of the target's that speculators keep for training.
COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")
NEEDS = {
    "DFlash2": "its dynamic convolutions around every sublayer and its path selector",
    "Domino": "its recurrent correction head",
}


def block_kind(source: Source) -> str | None:
    """"dflash" or "dspark" if a source is such a head, else None. Raises InputError for what follows them."""
    config, names = source.config, source.tensors
    classes = " ".join(map(str, config.get("architectures") or ()))
    said = config.get("speculators_model_type")
    for name, what in NEEDS.items():
        if name in classes or said == name.lower():
            raise InputError(f"{source.path}: a {name} head is not supported: it needs {what}")
    # P-EAGLE heads may have a Markov head too.
    bare = {name.removeprefix("model.") for name in names}
    markov = any(name.startswith("markov_head.") for name in bare) and "mask_hidden" not in bare
    if said == "dspark" or "DSpark" in classes or markov:
        return "dspark"
    if said == "dflash" or "DFlash" in classes or "JetSpec" in classes or "dflash_config" in config:
        return "dflash"
    return None


def read_block_layout(source: Source, target: ModelArgs, config: dict) -> Layout:
    """Everything about a DFlash or DSpark head. config: the source's, flat.

    Raises InputError if the head is a variant that we cannot run, or if its config leaves open what it needs.
    """
    path, tensors = source.path, {n.removeprefix("model."): e for n, e in source.tensors.items()}
    tensors = {name: entry for name, entry in tensors.items() if name not in COPIES}
    nested = config.get("dflash_config") or {}
    kind, flags = block_kind(source), config | nested
    if any(kind == "sliding_attention" for kind in flags.get("layer_types") or ()):
        raise InputError(f"{path}: layers with a sliding window (layer_types) are not supported in a head")
    fields = model_fields(path, config | {"tie_word_embeddings": False}) | {
        "kind": kind, "fc_bias": "fc.bias" in tensors, "tie_embeddings": False,
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "target_hidden_size": flags.get("target_hidden_size") or target.hidden_size,
        "aux_layers": _aux_layers(source, flags, target),
        "block": _number(source, flags, "block_size"), "mask_id": _number(source, flags, "mask_token_id"),
        "causal": bool(flags.get("causal") or flags.get("causal_head")),
        "from_anchor": bool(flags.get("sample_from_anchor", kind == "dspark")),
        "own_lm_head": "lm_head.weight" in tensors, **markov_fields(source.path, flags, tensors),
    }
    lm_head = tensors.get("lm_head.weight")
    fields["draft_vocab_size"] = flags.get("draft_vocab_size") or (
        lm_head.shape[0] if lm_head and lm_head.shape else fields["vocab_size"]
    )
    return Layout(fields, BLOCK, tensors)


def _number(source: Source, flags: dict, key: str) -> int:
    """A number that a config must have. Raises InputError."""
    value = flags.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{source.path}: config: {key} must be a number, found {value!r}")
    return value


def _aux_layers(source: Source, flags: dict, target: ModelArgs) -> list[int]:
    """The target layers whose inputs the head reads. Raises InputError."""
    key, shift = ("target_layer_ids", 1) if "target_layer_ids" in flags else ("aux_hidden_state_layer_ids", 0)
    ids = flags.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise InputError(f"{source.path}: config: {key} must be a list of layer numbers, found {ids!r}")
    if max(ids) + shift >= target.num_layers:
        raise InputError(
            f"{source.path}: config: {key} {ids}: the output of the target's last layer is normed where this"
            " head was trained, and not here; it is not supported"
        )
    return [i + shift for i in ids]


def markov_fields(path: Path, flags: dict, tensors: dict[str, Entry]) -> dict:
    """The fields of `networks.markov.MarkovArgs`, told by the tensors. Raises InputError."""
    kind = str(flags.get("markov_head_type") or "vanilla")
    table = tensors.get("markov_head.markov_w1.weight")
    if table is not None and kind not in ("vanilla", "gated"):
        raise InputError(
            f"{path}: a Markov head of type {kind!r} is not supported (vanilla and gated are): its"
            " state goes from token to token"
        )
    rank = table.shape[1] if table is not None and len(table.shape) == 2 else 0
    reads = tensors.get("confidence_head.proj.weight")
    width = reads.shape[-1] if reads is not None and reads.shape else 0
    with_markov = flags.get("confidence_head_with_markov")
    hidden = flags.get("hidden_size")
    return {
        "markov_rank": rank, "markov_gated": rank > 0 and kind == "gated", "confidence": reads is not None,
        "confidence_reads_markov": width != hidden if with_markov is None else bool(with_markov),
    }
