"""The layouts of Medusa and Hydra heads.

Below, {k} counts guesses and {block} counts the residual blocks of a guess.

Medusa (FasterDecoding): "{k}.{block}.linear.{weight,bias}" and "{k}.{blocks}.weight", the lm_head, which is
absent if the target's lm_head serves all (the legacy trainer). Inside a Medusa-2 model all this stands under
"medusa_head.". vLLM's copies: "blocks.{k}.layers.{block}.{weight,bias}", "lm_heads.{k}.weight", and maybe
"token_map", the target id of each draft id.

Hydra: "hydra_mlp.{k}.{slot}.linear|res_connection.*", "hydra_lm_head.{k}.[{slot}.]{weight,bias}" and for
Hydra++ "prefix_embeding_layer.*" (so spelled).

Configs miscount heads, so the tensors are counted. We write vLLM's layout for Medusa, and Hydra's with a
`token_map`.
"""
from __future__ import annotations

import dataclasses
import re

import torch

from checkpoint.dense import LAYER, HeadOptions, NameTable, ReadHead, layer_flags, with_prefix
from checkpoint.layouts import Published, publish
from checkpoint.source import Entry, Source
from common.errors import InputError
from model import ModelArgs
from networks.medusa import MedusaHeads, MultiTokenHeads

MEDUSA2 = "medusa_head."
TARGETS_TABLE = ("prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")  # copies of it
PREFIX = "prefix_embeding_layer."


@dataclasses.dataclass(frozen=True)
class Form:
    """Names of stacks of blocks in a layout: patterns with the guess k and the slot, and all slots.

    narrowing: the number of first blocks, with a skip connection, that no other block can equal.
    """

    block: str
    lm_head: str
    slots: tuple[int, ...]
    narrowing: int = 0


def table(form: Form, config: dict) -> tuple[NameTable, dict[str, str]]:
    """Return the names of Medusa's or Hydra's tensors, and the original of each tensor that is a copy.

    config: `guesses`, `repeated`, `own_lm_head` (one for all), `lm_head_each`, `prefix`.
    """
    names: NameTable = {}
    copies: dict[str, str] = {}
    for k in range(config["guesses"]):
        for leaf in ("weight", "bias"):
            for i, slot in enumerate(form.slots):
                name = f"{form.block.format(k, slot)}.{leaf}"
                if config["repeated"] and i > form.narrowing:
                    copies[name] = f"{form.block.format(k, form.slots[form.narrowing])}.{leaf}"
                else:
                    names[f"stacks.{k}.{i}.linear.{leaf}"] = [name]
            if form.narrowing:
                skip = form.block.format(k, form.slots[0]).replace(".linear", ".res_connection")
                names[f"stacks.{k}.0.skip.{leaf}"] = [f"{skip}.{leaf}"]
            if config["lm_head_each"]:
                names[f"lm_heads.{k}.{leaf}"] = [f"{form.lm_head.format(k)}.{leaf}"]
        if config["own_lm_head"] and k:
            copies[f"{form.lm_head.format(k)}.weight"] = f"{form.lm_head.format(0)}.weight"
    if config["own_lm_head"]:
        names["lm_head.weight"] = [f"{form.lm_head.format(0)}.weight"]
    if config["prefix"]:
        norm = {"attn_norm.weight": ["input_layernorm.weight"]}
        names |= with_prefix(LAYER | norm, "prefix_layer.", f"{PREFIX}layers.0.")
        names["prefix_norm.weight"] = [f"{PREFIX}norm.weight"]
    return names, copies


def target_inside(source: Source) -> Source | None:
    """Return the target of a Medusa-2 model, which carries its heads; None of any other source."""
    own = {name: entry for name, entry in source.tensors.items() if not name.startswith(MEDUSA2)}
    whole = len(own) < len(source.tensors) and any(name.startswith("model.layers.") for name in own)
    return dataclasses.replace(source, tensors=own) if whole else None


def read_medusa(source: Source, kind: str, target: ModelArgs, options: HeadOptions) -> ReadHead:
    """Read Medusa or Hydra heads. Raises InputError if tensors are missing or make no sense."""
    tensors = dict(source.tensors)
    if any(name.startswith(MEDUSA2) for name in tensors):  # the other tensors are the target
        tensors = {n.removeprefix(MEDUSA2): t for n, t in tensors.items() if n.startswith(MEDUSA2)}
    tensors = {name: entry for name, entry in tensors.items() if name not in TARGETS_TABLE}
    guesses, form = _form(source, kind, tensors)
    if form.block.startswith("blocks."):  # vLLM's copies have biases only if medusa_fc_bias says so
        for name in [n for n in tensors if n.startswith("blocks.") and n.endswith(".weight")]:
            bias, weight = name.replace(".weight", ".bias"), tensors[name]
            if bias not in tensors:
                zeros = torch.zeros(weight.shape[:1], dtype=weight.dtype)
                tensors[bias] = Entry(zeros.shape, zeros.dtype, lambda zeros=zeros: zeros)
    config = {field.name: getattr(target, field.name) for field in dataclasses.fields(ModelArgs)} | {
        "kind": kind, "num_layers": 1, "tie_embeddings": False, "qkv_bias": False, "qk_norm": False,
        "target_hidden_size": target.hidden_size,
        "aux_layers": [target.num_layers],
        "guesses": guesses, "blocks": len(form.slots), "draft_vocab_size": target.vocab_size,
        "repeated": False, "own_lm_head": False, "lm_head_each": False, "lm_head_bias": False,
        "prefix": any(name.startswith(PREFIX) for name in tensors),
    }
    if len(form.slots) > 1 + form.narrowing:
        config["repeated"] = _copied(form, config | {"repeated": True}, tensors)
    config |= _lm_heads(form, config, tensors) | _prefix_layer(config, tensors)
    names, copies = table(form, config)
    tensors = {name: entry for name, entry in tensors.items() if name not in copies}
    return ReadHead(config, names, tensors)


def _form(source: Source, kind: str, tensors: dict[str, Entry]) -> tuple[int, Form]:
    """Return the number of guesses, and how the file names them. Raises InputError."""
    def numbers(pattern: str) -> list[tuple[int, ...]]:
        pattern = re.escape(pattern).replace(r"\{\}", r"(\d+)")
        return sorted({tuple(map(int, m.groups())) for m in (re.fullmatch(pattern, n) for n in tensors) if m})

    vllm = any(name.startswith("blocks.") for name in tensors)
    medusa = "blocks.{}.layers.{}" if vllm else "{}.{}.linear"
    block = medusa if kind == "medusa" else "hydra_mlp.{}.{}.linear"
    places = numbers(block + ".weight")
    if not places:
        raise InputError(f"{source.path}: no {kind.title()} head is complete: {block.format(0, 0)}.weight is"
                         " missing")
    if (most := max(map(max, places))) > 63:
        raise InputError(f"{source.path}: tensors number guesses or blocks up to {most}; expected at most 63")
    guesses = 1 + max(k for k, _ in places)
    slots = tuple(slot for k, slot in places if k == 0)
    if kind == "medusa":
        slots = tuple(range(1 + max(slot for _, slot in places)))
        return guesses, Form(block, "lm_heads.{}" if vllm else f"{{}}.{len(slots)}", slots)
    lm_slot = numbers("hydra_lm_head.0.{}.weight")
    return guesses, Form(block, "hydra_lm_head.{}" + (f".{lm_slot[0][0]}" if lm_slot else ""), slots, 1)


def _copied(form: Form, config: dict, tensors: dict[str, Entry]) -> bool:
    """Return whether all weights that this config says are copies are there, and equal bit for bit."""
    def equal(a: str, b: str) -> bool:
        one, other = tensors.get(a), tensors.get(b)
        return bool(one and other) and one.shape == other.shape and torch.equal(one.read(), other.read())

    return all(equal(*pair) for pair in table(form, config)[1].items() if pair[0].endswith(".weight"))


def _lm_heads(form: Form, config: dict, tensors: dict[str, Entry]) -> dict:
    """Return which lm_heads there are: none (the target's), one for all guesses, or one for each."""
    first = form.lm_head.format(0)
    weight, has_bias = tensors.get(f"{first}.weight"), f"{first}.bias" in tensors
    found = {"lm_head_bias": has_bias}
    if weight is None:
        return found
    found["draft_vocab_size"] = weight.shape[0] if weight.shape else 0
    shared = not has_bias and _copied(form, config | {"repeated": False, "own_lm_head": True}, tensors)
    return found | {"own_lm_head" if shared else "lm_head_each": True}


def _prefix_layer(config: dict, tensors: dict[str, Entry]) -> dict:
    """Return the sizes of Hydra++'s layer."""
    layer = f"{PREFIX}layers.0."
    gate, key = (tensors.get(f"{layer}{part}.weight") for part in ("mlp.gate_proj", "self_attn.k_proj"))
    if not config["prefix"] or not (gate and key):
        return {}
    return layer_flags(tensors, layer) | {
        "intermediate_size": gate.shape[0], "num_kv_heads": key.shape[0] // config["head_dim"],
    }


def write_medusa(head: MultiTokenHeads, kind: str, layout: str, target: dict) -> Published:
    """Write Medusa heads in vLLM's layout, Hydra heads in their authors'."""
    args = head.args
    slots = tuple(range(args.blocks))
    if isinstance(head, MedusaHeads):
        form = Form("blocks.{}.layers.{}", "lm_heads.{}", slots)
        config = {
            "model_type": "medusa", "num_heads": args.guesses,
            "num_hidden_layers": args.blocks, "hidden_size": args.hidden_size, "vocab_size": args.vocab_size,
            "truncated_vocab_size": args.draft_vocab_size, "medusa_fc_bias": True,
        }
    else:
        form = Form("hydra_mlp.{}.{}.linear", "hydra_lm_head.{}", slots, 1)
        config = {
            "hydra_num_heads": args.guesses, "hydra_num_layers": args.blocks,
            "hydra_head_arch": "prefix-mlp" if args.prefix else "mlp",
            "grounded_heads": True, "hidden_state_offset": 0,
        }
    names, copies = table(form, dataclasses.asdict(args))
    tensors = publish(head, names)
    tensors |= {copy: tensors[name].clone() for copy, name in copies.items()}
    if args.draft_vocab_size < args.vocab_size:
        tensors["token_map"] = head.draft_ids.cpu()
    return config, tensors
