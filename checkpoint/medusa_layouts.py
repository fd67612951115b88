"""The layouts of Medusa and Hydra heads, and what they become.

Medusa (FasterDecoding): "{k}.{block}.linear.{weight,bias}" and, unless the target's lm_head serves all (the
legacy trainer), "{k}.{blocks}.weight"; under "medusa_head." inside a Medusa-2 model. vLLM's copies:
"blocks.{k}.layers.{block}.{weight,bias}", "lm_heads.{k}.weight", maybe "token_map", the target id of each
draft id. Hydra: "hydra_mlp.{k}.{slot}.linear|res_connection.*", "hydra_lm_head.{k}.[{slot}.]{weight,bias}"
and for Hydra++ "prefix_embeding_layer.*" (so spelled). Configs miscount heads: the tensors are counted. What
`train.py` writes is vLLM's layout for Medusa, and Hydra's with a `token_map`.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch

from checkpoint.source import Entry, Source
from checkpoint.target_families import ATTENTION, DENSE
from common.errors import InputError
from model import ModelArgs

# Our config, names, tensors under those names: see head_layouts.Layout.
Found = tuple[dict, dict[str, list[str]], dict[str, Entry]]
IGNORED = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")  # the target's table again


def medusa_kind(source: Source) -> str | None:
    """"medusa" or "hydra" if that is what the tensors are."""
    names = source.tensors
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    medusa = r"(medusa_head\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight)$"
    return "medusa" if any(re.match(medusa, name) for name in names) else None


def read_medusa_layout(source: Source, target: ModelArgs) -> Found:
    """Everything about Medusa or Hydra heads. Raises InputError if the tensors are not what the layouts say.
    """
    kind, tensors = medusa_kind(source), dict(source.tensors)
    # The rest is a target, which is converted by itself.
    if any(name.startswith("medusa_head.") for name in tensors):
        tensors = {
            n.removeprefix("medusa_head."): t for n, t in tensors.items() if n.startswith("medusa_head.")
        }
    tensors = {n: t for n, t in tensors.items() if n not in IGNORED and not n.endswith("rotary_emb.inv_freq")}
    token_map = tensors.pop("token_map", None)
    config = dataclasses.asdict(target) | {
        "kind": kind, "num_layers": 1, "num_experts": 0, "tie_embeddings": False,
        "target_hidden_size": target.hidden_size,
        "aux_layers": [target.num_layers], "qkv_bias": False, "qk_norm": False, "own_lm_head": False,
        "lm_head_each": False,
    }
    config, names = (_medusa if kind == "medusa" else _hydra)(source, config, tensors)
    _lm_heads(config, names, tensors)
    if token_map is not None:
        ids = token_map.read().long()
        if len(ids.unique()) != len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise InputError(f"{source.path}: token_map holds ids twice, or outside the target's vocabulary")
        config["draft_ids"] = ids
    return config, names, tensors


def _numbers(tensors: dict, pattern: str) -> list[tuple[int, ...]]:
    found = (re.fullmatch(pattern, name) for name in tensors)
    return sorted({tuple(map(int, m.groups())) for m in found if m})


def _medusa(source: Source, config: dict, tensors: dict[str, Entry]) -> tuple[dict, dict]:
    vllm = any(name.startswith("blocks.") for name in tensors)
    block = "blocks.{}.layers.{}" if vllm else "{}.{}.linear"
    places = _numbers(tensors, re.escape(block + ".weight").replace(r"\{\}", r"(\d+)"))
    if not places:
        raise InputError(
            f"{source.path}: no Medusa head is whole: there is no tensor {block.format(0, 0)}.weight"
        )
    guesses, blocks = (1 + max(column) for column in zip(*places))
    repeated = blocks > 1 and all(
        _equal(tensors, block.format(k, 0), block.format(k, i)) for k in range(guesses)
        for i in range(1, blocks)
    )
    names = {}
    for k in range(guesses):
        for i in range(blocks):
            for leaf in ("weight", "bias"):
                theirs = f"{block.format(k, i)}.{leaf}"
                if repeated and i:
                    tensors.pop(theirs, None)
                    continue
                names[f"stacks.{k}.{i}.linear.{leaf}"] = [theirs]
                like = tensors.get(f"{block.format(k, i)}.weight")
                # There only if medusa_fc_bias says so.
                if vllm and leaf == "bias" and like and theirs not in tensors:
                    tensors[theirs] = _zeros(like.shape[:1], like.dtype)
        names[f"lm_heads.{k}.weight"] = [f"lm_heads.{k}.weight" if vllm else f"{k}.{blocks}.weight"]
    return config | {"guesses": guesses, "blocks": blocks, "repeated": repeated}, names


def _hydra(source: Source, config: dict, tensors: dict[str, Entry]) -> tuple[dict, dict]:
    places = _numbers(tensors, r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
    guesses = 1 + max((k for k, _ in places), default=-1)
    if not places:
        raise InputError(
            f"{source.path}: no Hydra head is whole: there is no tensor hydra_mlp.0.*.linear.weight"
        )
    slots = [slot for k, slot in places if k == 0]
    rest = len(slots) - 1
    head = "hydra_mlp.{}.{}.linear"
    repeated = rest > 1 and all(
        _equal(tensors, head.format(k, slots[1]), head.format(k, s)) for k in range(guesses)
        for s in slots[2:]
    )
    lm_slot = _numbers(tensors, r"hydra_lm_head\.0\.(\d+)\.weight")
    names: dict[str, list[str]] = {}
    for k in range(guesses):
        for i, slot in enumerate(slots):
            for leaf in ("weight", "bias"):
                if repeated and i > 1:
                    tensors.pop(f"{head.format(k, slot)}.{leaf}", None)
                    continue
                names[f"stacks.{k}.{i}.linear.{leaf}"] = [f"{head.format(k, slot)}.{leaf}"]
                if not i:
                    names[f"stacks.{k}.0.skip.{leaf}"] = [f"hydra_mlp.{k}.{slot}.res_connection.{leaf}"]
        for leaf in ("weight", "bias"):
            names[f"lm_heads.{k}.{leaf}"] = [
                f"hydra_lm_head.{k}.{f'{lm_slot[0][0]}.' if lm_slot else ''}{leaf}"
            ]
    prefix = any(name.startswith("prefix_embeding_layer.") for name in tensors)
    if prefix:
        layer = "prefix_embeding_layer.layers.0."
        names |= {
            f"prefix_layer.{ours}": [layer + t for t in theirs] for ours,
            theirs in (ATTENTION | DENSE).items()
        }
        names["prefix_layer.attn_norm.weight"] = [layer + "input_layernorm.weight"]
        names["prefix_norm.weight"] = ["prefix_embeding_layer.norm.weight"]
        config |= {
            "qkv_bias": layer + "self_attn.q_proj.bias" in tensors,
            "qk_norm": layer + "self_attn.q_norm.weight" in tensors
        }
        shapes = {part: tensors[n].shape for part in ("mlp.gate_proj", "self_attn.q_proj", "self_attn.k_proj")
                  if (n := f"{layer}{part}.weight") in tensors}
        if len(shapes) == 3:
            config["intermediate_size"] = shapes["mlp.gate_proj"][0]
            config["num_kv_heads"] = shapes["self_attn.k_proj"][0] // config["head_dim"]
    return config | {"guesses": guesses, "blocks": len(slots), "repeated": repeated, "prefix": prefix}, names


def _lm_heads(config: dict, names: dict[str, list[str]], tensors: dict[str, Entry]) -> None:
    """Settle which lm_heads there are: none (the target's), one for all, or one each."""
    guesses = range(config["guesses"])
    theirs = [names[f"lm_heads.{k}.weight"][0] for k in guesses]
    biases = [names.pop(f"lm_heads.{k}.bias", [""])[0] for k in guesses]
    config["lm_head_bias"] = biases[0] in tensors
    config["draft_vocab_size"] = tensors[theirs[0]].shape[0] if theirs[0] in tensors else config["vocab_size"]
    if theirs[0] not in tensors:
        for k in guesses:
            del names[f"lm_heads.{k}.weight"]
    elif not config["lm_head_bias"] and all(_equal(tensors, theirs[0], name, "") for name in theirs[1:]):
        for k in guesses:
            del names[f"lm_heads.{k}.weight"]
            if k:
                del tensors[theirs[k]]
        names["lm_head.weight"] = [theirs[0]]
        config["own_lm_head"] = True
    else:
        config["lm_head_each"] = True
        if config["lm_head_bias"]:
            names |= {f"lm_heads.{k}.bias": [bias] for k, bias in enumerate(biases)}


def _equal(tensors: dict[str, Entry], a: str, b: str, leaf: str = ".weight") -> bool:
    """Whether two tensors are one, bit for bit."""
    one, other = tensors.get(a + leaf), tensors.get(b + leaf)
    return one is not None and other is not None and one.shape == other.shape and torch.equal(
        one.read(), other.read()
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    blocks: Callable = lambda: iter((torch.zeros(shape, dtype=dtype),))  # noqa: E731
    return Entry(shape, dtype, blocks)
