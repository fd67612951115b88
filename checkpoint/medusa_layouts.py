"""The layouts of Medusa and Hydra heads.

Below, {k} counts guesses and {block} counts the residual blocks of a guess.

Medusa (FasterDecoding): "{k}.{block}.linear.{weight,bias}" and "{k}.{blocks}.weight", the lm_head, which is
absent if the target's lm_head serves all (the legacy trainer). Inside a Medusa-2 model all this stands under
"medusa_head.". vLLM's copies: "blocks.{k}.layers.{block}.{weight,bias}", "lm_heads.{k}.weight", and maybe
"token_map", the target id of each draft id.

Hydra: "hydra_mlp.{k}.{slot}.linear|res_connection.*", "hydra_lm_head.{k}.[{slot}.]{weight,bias}" and for
Hydra++ "prefix_embeding_layer.*" (so spelled).

Configs miscount heads, so the tensors are counted. `checkpoint.export` writes vLLM's layout for Medusa, and
Hydra's with a `token_map`.
"""
from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch

from checkpoint.layout import Layout, NameTable
from checkpoint.source import Entry, Source
from checkpoint.target_families import ATTENTION, DENSE, with_prefix
from common.errors import InputError
from model import ModelArgs

MEDUSA2 = "medusa_head."
NUMBER = "([0-9]{1,9})"
MOST = 64  # guesses, and blocks of each
TARGETS_TABLE = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")  # copies of it


def medusa_kind(source: Source) -> str | None:
    """"medusa" or "hydra" if the tensors are such heads, else None."""
    names = source.tensors
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    medusa = r"(medusa_head\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)$"
    return "medusa" if any(re.match(medusa, name) for name in names) else None


def read_medusa_layout(source: Source, target: ModelArgs) -> Layout:
    """Everything about Medusa or Hydra heads. Raises InputError if tensors are missing or make no sense."""
    kind, tensors = medusa_kind(source), dict(source.tensors)
    if any(name.startswith(MEDUSA2) for name in tensors):  # the other tensors are the target
        tensors = {n.removeprefix(MEDUSA2): t for n, t in tensors.items() if n.startswith(MEDUSA2)}
    tensors = {name: entry for name, entry in tensors.items() if name not in TARGETS_TABLE}
    token_map = tensors.pop("token_map", None)
    config = dataclasses.asdict(target) | {
        "kind": kind, "num_layers": 1, "num_experts": 0, "tie_embeddings": False,
        "target_hidden_size": target.hidden_size, "aux_layers": [target.num_layers], "qkv_bias": False,
        "qk_norm": False, "own_lm_head": False, "lm_head_each": False,
    }
    if kind == "medusa":
        changes, names = _medusa(source.path, tensors)
    else:
        changes, names = _hydra(source.path, tensors, target.head_dim)
    config |= changes
    config |= _lm_heads(config, names, tensors)
    if token_map is not None:
        ids = token_map.read().long()
        if len(ids.unique()) != len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise InputError(f"{source.path}: token_map holds ids twice, or outside the target's vocabulary")
        config["draft_ids"] = ids
    return Layout(config, names, tensors)


def _numbers(tensors: dict, pattern: str) -> list[tuple[int, ...]]:
    """The numbers in the tensor names that match a pattern, sorted."""
    matches = (re.fullmatch(pattern, name) for name in tensors)
    return sorted({tuple(map(int, m.groups())) for m in matches if m})


def _medusa(path: Path, tensors: dict[str, Entry]) -> tuple[dict, NameTable]:
    """(Changes of the config, table of names). Tensors that repeat others are taken out of `tensors`."""
    vllm = any(name.startswith("blocks.") for name in tensors)
    block = "blocks.{}.layers.{}" if vllm else "{}.{}.linear"
    places = _numbers(tensors, re.escape(block + ".weight").replace(r"\{\}", NUMBER))
    if not places:
        raise InputError(
            f"{path}: no Medusa head is complete: there is no tensor {block.format(0, 0)}.weight"
        )
    guesses, blocks = (1 + max(column) for column in zip(*places))
    if max(guesses, blocks) > MOST:
        raise InputError(
            f"{path}: tensors of {guesses:,} guesses of {blocks:,} blocks; expected at most {MOST} of each"
        )
    repeated = blocks > 1 and all(
        _equal(tensors, f"{block.format(k, 0)}.weight", f"{block.format(k, i)}.weight")
        for k in range(guesses) for i in range(1, blocks)
    )
    names = {}
    for k in range(guesses):
        for i in range(blocks):
            for leaf in ("weight", "bias"):
                name = f"{block.format(k, i)}.{leaf}"
                if repeated and i:
                    tensors.pop(name, None)
                    continue
                names[f"stacks.{k}.{i}.linear.{leaf}"] = [name]
                weight = tensors.get(f"{block.format(k, i)}.weight")
                # vLLM's copies have biases only if medusa_fc_bias says so.
                if vllm and leaf == "bias" and weight and name not in tensors:
                    tensors[name] = _zeros(weight.shape[:1], weight.dtype)
        names[f"lm_heads.{k}.weight"] = [f"lm_heads.{k}.weight" if vllm else f"{k}.{blocks}.weight"]
    return {"guesses": guesses, "blocks": blocks, "repeated": repeated}, names


def _hydra(path: Path, tensors: dict[str, Entry], head_dim: int) -> tuple[dict, NameTable]:
    """(Changes of the config, table of names). Tensors that repeat others are taken out of `tensors`."""
    places = _numbers(tensors, rf"hydra_mlp\.{NUMBER}\.{NUMBER}\.linear\.weight")
    if not places:
        raise InputError(
            f"{path}: no Hydra head is complete: there is no tensor hydra_mlp.0.*.linear.weight"
        )
    guesses = 1 + max(k for k, _ in places)
    if guesses > MOST or len(places) > MOST * guesses:
        raise InputError(f"{path}: tensors of {guesses:,} guesses; expected at most {MOST}")
    slots = [slot for k, slot in places if k == 0]
    block = "hydra_mlp.{}.{}.linear"
    repeated = len(slots) > 2 and all(
        _equal(tensors, f"{block.format(k, slots[1])}.weight", f"{block.format(k, slot)}.weight")
        for k in range(guesses) for slot in slots[2:]
    )
    lm_slot = _numbers(tensors, rf"hydra_lm_head\.0\.{NUMBER}\.weight")
    lm_head = "hydra_lm_head.{}." + (f"{lm_slot[0][0]}." if lm_slot else "")
    names: NameTable = {}
    for k in range(guesses):
        for leaf in ("weight", "bias"):
            for i, slot in enumerate(slots):
                name = f"{block.format(k, slot)}.{leaf}"
                if repeated and i > 1:
                    tensors.pop(name, None)
                    continue
                names[f"stacks.{k}.{i}.linear.{leaf}"] = [name]
            if slots:
                names[f"stacks.{k}.0.skip.{leaf}"] = [f"hydra_mlp.{k}.{slots[0]}.res_connection.{leaf}"]
            names[f"lm_heads.{k}.{leaf}"] = [lm_head.format(k) + leaf]
    config = {"guesses": guesses, "blocks": len(slots), "repeated": repeated, "prefix": False}
    if any(name.startswith("prefix_embeding_layer.") for name in tensors):
        config["prefix"] = True
        layer = "prefix_embeding_layer.layers.0."
        names |= with_prefix(ATTENTION | DENSE, "prefix_layer.", layer)
        names["prefix_layer.attn_norm.weight"] = [layer + "input_layernorm.weight"]
        names["prefix_norm.weight"] = ["prefix_embeding_layer.norm.weight"]
        config["qkv_bias"] = layer + "self_attn.q_proj.bias" in tensors
        config["qk_norm"] = layer + "self_attn.q_norm.weight" in tensors
        parts = ("mlp.gate_proj", "self_attn.q_proj", "self_attn.k_proj")
        gate, query, key = (tensors.get(f"{layer}{part}.weight") for part in parts)
        if gate and query and key:
            config["intermediate_size"] = gate.shape[0]
            config["num_kv_heads"] = key.shape[0] // head_dim
    return config, names


def _lm_heads(config: dict, names: NameTable, tensors: dict[str, Entry]) -> dict:
    """Settle which lm_heads there are: none (the target's), one for all guesses, or one for each.

    Returns the changes of the config. `names` and `tensors` lose what is not used.
    """
    guesses = range(config["guesses"])
    weights = [names.pop(f"lm_heads.{k}.weight")[0] for k in guesses]
    biases = [names.pop(f"lm_heads.{k}.bias", [""])[0] for k in guesses]
    has_bias = biases[0] in tensors
    if weights[0] not in tensors:
        return {"lm_head_bias": has_bias, "draft_vocab_size": config["vocab_size"]}
    changes = {"lm_head_bias": has_bias, "draft_vocab_size": tensors[weights[0]].shape[0]}
    if not has_bias and all(_equal(tensors, weights[0], name) for name in weights[1:]):
        for name in weights[1:]:
            del tensors[name]
        names["lm_head.weight"] = [weights[0]]
        return changes | {"own_lm_head": True}
    names |= {f"lm_heads.{k}.weight": [weight] for k, weight in enumerate(weights)}
    if has_bias:
        names |= {f"lm_heads.{k}.bias": [bias] for k, bias in enumerate(biases)}
    return changes | {"lm_head_each": True}


def _equal(tensors: dict[str, Entry], a: str, b: str) -> bool:
    """Whether both tensors are there and equal bit for bit."""
    one, other = tensors.get(a), tensors.get(b)
    return bool(one and other) and one.shape == other.shape and torch.equal(one.read(), other.read())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    return Entry.of(shape, dtype, lambda: torch.zeros(shape, dtype=dtype))
