"""The layouts of Medusa and Hydra heads.

{k}: index of a head. {block}: index of its residual block. {blocks}: their number.

Medusa (FasterDecoding): "{k}.{block}.linear.{weight,bias}" and "{k}.{blocks}.weight", the lm_head, which is
absent if all heads use the target's lm_head (legacy trainer). In a Medusa-2 model the prefix is
"medusa_head.". vLLM's copies: "blocks.{k}.layers.{block}.{weight,bias}", "lm_heads.{k}.weight", and maybe
"token_map", the target id of each draft id.

Hydra: "hydra_mlp.{k}.{slot}.linear|res_connection.*", "hydra_lm_head.{k}.[{slot}.]{weight,bias}" and for
Hydra++ "prefix_embeding_layer.*" (sic).

The number of heads is derived from the tensors, because configs may be wrong.
"""
from __future__ import annotations

import dataclasses
import re

import torch

from checkpoint.dense import LAYER, NameTable, with_prefix
from checkpoint.layouts import HeadOptions, ReadHead, layer_flags
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs

MEDUSA2 = "medusa_head."  # prefix of the heads' tensors inside a Medusa-2 model
EMBEDDING_COPIES = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")
PREFIX = "prefix_embeding_layer."


@dataclasses.dataclass(frozen=True)
class Form:
    """Name patterns of a layout, formatted with the head k and the slot of a block. slots: of all blocks.

    has_skip: the first block projects its input for its skip connection.
    """

    block: str
    lm_head: str
    slots: tuple[int, ...]
    has_skip: bool = False


def names_of(form: Form, config: dict) -> NameTable:
    """Return the table of Medusa's or Hydra's tensors.

    config: `guesses`, `lm_head_each`, `prefix`.
    """
    names: NameTable = {}
    for k in range(config["guesses"]):
        for leaf in ("weight", "bias"):
            for i, slot in enumerate(form.slots):
                names[f"stacks.{k}.{i}.linear.{leaf}"] = [f"{form.block.format(k, slot)}.{leaf}"]
            if form.has_skip:
                skip = form.block.format(k, form.slots[0]).replace(".linear", ".res_connection")
                names[f"stacks.{k}.0.skip.{leaf}"] = [f"{skip}.{leaf}"]
            if config["lm_head_each"]:
                names[f"lm_heads.{k}.{leaf}"] = [f"{form.lm_head.format(k)}.{leaf}"]
    if config["prefix"]:
        norm = {"attn_norm.weight": ["input_layernorm.weight"]}
        names |= with_prefix(LAYER | norm, "prefix_layer.", f"{PREFIX}layers.0.")
        names["prefix_norm.weight"] = [f"{PREFIX}norm.weight"]
    return names


def read_medusa(source: Source, kind: str, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read Medusa or Hydra heads. Raises InputError if tensors are missing or inconsistent."""
    tensors = dict(source.tensors)
    if any(name.startswith(MEDUSA2) for name in tensors):  # the other tensors are the target
        tensors = {n.removeprefix(MEDUSA2): t for n, t in tensors.items() if n.startswith(MEDUSA2)}
    tensors = {name: entry for name, entry in tensors.items() if name not in EMBEDDING_COPIES}
    guesses, form = _form(source, kind, tensors)
    if form.block.startswith("blocks."):  # vLLM's copies have biases only if medusa_fc_bias says so
        for name in [n for n in tensors if n.startswith("blocks.") and n.endswith(".weight")]:
            bias, weight = name.replace(".weight", ".bias"), tensors[name]
            if bias not in tensors:
                zeros = torch.zeros(weight.shape[:1], dtype=weight.dtype)
                tensors[bias] = Entry(zeros.shape, zeros.dtype, lambda zeros=zeros: zeros)
    lm_head, gate, key = (tensors.get(f"{name}.weight") for name in (
        form.lm_head.format(0), f"{PREFIX}layers.0.mlp.gate_proj", f"{PREFIX}layers.0.self_attn.k_proj"))
    config = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelArgs)} | {
        "kind": kind, "num_layers": 1, "tie_embeddings": False, "qkv_bias": False, "qk_norm": False,
        "target_hidden_size": target.hidden_size, "aux_layers": [target.num_layers],
        "guesses": guesses, "blocks": len(form.slots),
        "own_lm_head": False, "lm_head_each": lm_head is not None,
        "lm_head_bias": f"{form.lm_head.format(0)}.bias" in tensors,
        "draft_vocab_size": lm_head.shape[0] if lm_head and lm_head.shape else target.vocab_size,
        "prefix": any(name.startswith(PREFIX) for name in tensors),
    }
    if gate and key:  # sizes of Hydra++'s layer
        config |= layer_flags(tensors, f"{PREFIX}layers.0.") | {
            "intermediate_size": gate.shape[0], "num_kv_heads": key.shape[0] // config["head_dim"],
        }
    return ReadHead(config, names_of(form, config), tensors)


def _form(source: Source, kind: str, tensors: dict[str, Entry]) -> tuple[int, Form]:
    """Return the number of heads, and their name patterns. Raises InputError."""
    def indices(pattern: str) -> list[tuple[int, ...]]:
        pattern = re.escape(pattern).replace(r"\{\}", r"(\d+)")
        return sorted({tuple(map(int, m.groups())) for m in (re.fullmatch(pattern, n) for n in tensors) if m})

    vllm = any(name.startswith("blocks.") for name in tensors)
    medusa = "blocks.{}.layers.{}" if vllm else "{}.{}.linear"
    block = medusa if kind == "medusa" else "hydra_mlp.{}.{}.linear"
    block_indices = indices(block + ".weight")
    if not block_indices:
        raise InputError(f"{source.path}: tensor {block.format(0, 0)}.weight of a {kind.title()} head is"
                         " missing")
    if (max_index := max(map(max, block_indices))) > 63:
        raise InputError(f"{source.path}: a head or block has index {max_index}; expected at most 63")
    guesses = 1 + max(k for k, _ in block_indices)
    slots = tuple(slot for k, slot in block_indices if k == 0)
    if kind == "medusa":
        slots = tuple(range(1 + max(slot for _, slot in block_indices)))
        return guesses, Form(block, "lm_heads.{}" if vllm else f"{{}}.{len(slots)}", slots)
    lm_slot = indices("hydra_lm_head.0.{}.weight")
    return guesses, Form(block, "hydra_lm_head.{}" + (f".{lm_slot[0][0]}" if lm_slot else ""), slots, True)
