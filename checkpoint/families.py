"""The families of targets: how their files name tensors and what their configs leave unsaid.

`FAMILIES` has one entry for each. Sources: transformers' modelling files, llama.cpp's gguf/constants.py.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.folder import CONFIG, ROPE, check_rope, is_gguf
from checkpoint.source import Source
from common.errors import InputError, printable
from common.schema import ABSENT, Wrong, named
from model import ModelArgs

# Our tensor: the source tensors that it is made of, stacked along the output dimension in this order. In the
# names {i} is the layer and {e} the expert; all experts follow each other.
NameTable = dict[str, list[str]]
# Fields of ModelArgs: Hugging Face's keys, and what an absent one means (None: the key is needed, or follows
# from others). Read by `model_fields`, written by `checkpoint.heads`.
KEYS = {
    "vocab_size": ("vocab_size", None), "hidden_size": ("hidden_size", None),
    "intermediate_size": ("intermediate_size", None), "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None), "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None), "norm_eps": ("rms_norm_eps", 1e-6), "rope_base": ("rope_theta", 10000.0),
    "rope_scaling": ("rope_scaling", None), "max_seq_len": ("max_position_embeddings", 2048),
    "tie_embeddings": ("tie_word_embeddings", False),
}
NEEDED = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"
# Contexts from before linear scaling, at most. A longer one of a config that names no original is stretched.
MOST_BEFORE_SCALING = 8192

# The tables of one layer, without its prefix. Draft heads use the same names.
ATTENTION: NameTable = {
    "wqkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "wqkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "q_norm.weight": ["self_attn.q_norm.weight"],
    "k_norm.weight": ["self_attn.k_norm.weight"],
    "wo.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
}
DENSE: NameTable = {
    "mlp.w_gate_up.weight": [f"mlp.{x}_proj.weight" for x in ("gate", "up")],
    "mlp.w_down.weight": ["mlp.down_proj.weight"],
}
MIXTRAL: NameTable = {
    "mlp.router.weight": ["block_sparse_moe.gate.weight"],
    "mlp.w_gate_up": [f"block_sparse_moe.experts.{{e}}.{w}.weight" for w in ("w1", "w3")],
    "mlp.w_down": ["block_sparse_moe.experts.{e}.w2.weight"],
}
QWEN_MOE: NameTable = {
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.w_gate_up": [f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up")],
    "mlp.w_down": ["mlp.experts.{e}.down_proj.weight"],
}


def with_prefix(table: NameTable, prefix: str, source_prefix: str) -> NameTable:
    """A table whose tensors stand under these prefixes, on our side and in the source."""
    return {prefix + name: [source_prefix + s for s in sources] for name, sources in table.items()}


def parts_of(
    names: NameTable, args: ModelArgs, name: str, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the source tensors of one of our tensors with their shapes, in the order of stacking.

    Raises KeyError if the table does not have the tensor.
    """
    layer = re.search(r"(?<=^layers\.)\d+", name)
    patterns = names[name] if name in names else names[re.sub(r"^layers\.\d+", "layers.{i}", name)]
    experts = range(shape[0]) if len(shape) == 3 else (None,)
    sources = [pattern.format(i=layer and layer[0], e=e) for e in experts for pattern in patterns]
    if ".wqkv." in f".{name}":
        kv = args.num_kv_heads * args.head_dim
        rows = args.num_heads * args.head_dim, kv, kv
    elif ".w_gate_up" in name:
        rows = args.intermediate_size, args.intermediate_size
    else:
        rows = (shape[-2] if len(shape) > 1 else shape[0],)
    columns = shape[-1:] if len(shape) > 1 else ()
    return {source: (count, *columns) for source, count in zip(sources, rows * len(experts), strict=True)}


def hugging_face(mlp: NameTable) -> NameTable:
    """The table of a Hugging Face model whose layers have this kind of MLP."""
    layer = ATTENTION | mlp | {"attn_norm.weight": ["input_layernorm.weight"]}
    return {
        "embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"], **with_prefix(layer, "layers.{i}.", "model.layers.{i}."),
    }


GGUF: NameTable = {
    "embed.weight": ["token_embd.weight"],
    "norm.weight": ["output_norm.weight"],
    "lm_head.weight": ["output.weight"],
    **with_prefix({
        "attn_norm.weight": ["attn_norm.weight"],
        "mlp_norm.weight": ["ffn_norm.weight"],
        "wqkv.weight": [f"attn_{x}.weight" for x in "qkv"],
        "wqkv.bias": [f"attn_{x}.bias" for x in "qkv"],
        "q_norm.weight": ["attn_q_norm.weight"],
        "k_norm.weight": ["attn_k_norm.weight"],
        "wo.weight": ["attn_output.weight"],
        "mlp.w_gate_up.weight": [f"ffn_{x}.weight" for x in ("gate", "up")],
        "mlp.w_down.weight": ["ffn_down.weight"],
        # A GGUF stacks the experts of a layer; `checkpoint.gguf` takes the stacks apart.
        "mlp.router.weight": ["ffn_gate_inp.weight"],
        "mlp.w_gate_up": [f"ffn_{x}_exps.weight[{{e}}]" for x in ("gate", "up")],
        "mlp.w_down": ["ffn_down_exps.weight[{e}]"],
    }, "layers.{i}.", "blk.{i}."),
}


@dataclass(frozen=True)
class Family:
    """The properties that all targets of one architecture share.

    fixed: fields of ModelArgs that the architecture implies. defaults: values of config keys that a config
    may leave out, where they differ from LLaMA's. experts: whether the MLPs are mixtures of experts.
    """

    names: NameTable
    fixed: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    experts: bool = False


NO_WINDOW = {"use_sliding_window": False}  # Qwen's windows have a switch, off unless a config says otherwise
MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "LlamaForCausalLM": Family(hugging_face(DENSE)),
    "MistralForCausalLM": Family(
        hugging_face(DENSE), defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(hugging_face(DENSE), {"qkv_bias": True}, NO_WINDOW),
    "Qwen3ForCausalLM": Family(hugging_face(DENSE), {"qk_norm": True}, {"head_dim": 128, **NO_WINDOW}),
    "MixtralForCausalLM": Family(
        hugging_face(MIXTRAL), {"renormalise_experts": True}, MIXTRAL_DEFAULTS, experts=True
    ),
    "Qwen3MoeForCausalLM": Family(
        hugging_face(QWEN_MOE), {"qk_norm": True}, {"norm_topk_prob": False, **NO_WINDOW}, experts=True
    ),
    "gguf:llama": Family(GGUF),
    "gguf:qwen2": Family(GGUF, {"qkv_bias": True}),
    "gguf:qwen3": Family(GGUF, {"qk_norm": True}),
    "gguf:llama+experts": Family(GGUF, {"renormalise_experts": True}, experts=True),
    "gguf:qwen3moe+experts": Family(GGUF, {"qk_norm": True, "renormalise_experts": True}, experts=True),
}


def family_of(source: Source) -> Family:
    """The entry of `FAMILIES` for a source. Raises InputError naming the known ones."""
    if source.family not in FAMILIES:
        found, known = printable(str(source.family)), ", ".join(FAMILIES)
        raise InputError(f"{source.path}: unknown architecture {found} (known: {known})")
    return FAMILIES[source.family]


def target_fields(source: Source) -> dict:
    """The fields of ModelArgs, from the source's config and what its family implies.

    Raises InputError for anything that we would compute wrongly.
    """
    family, path = family_of(source), source.path
    _refuse(path, source.config, "attention_bias")
    # A default stands in for an absent key only: an explicit null means LLaMA's value.
    config = {k: v for k, v in {**family.defaults, **source.config}.items() if v is not None}
    fields = model_fields(path, config)
    fields |= family.fixed
    if not family.experts:
        return fields
    _refuse(path, config, "mlp_only_layers")
    if config.get("decoder_sparse_step", 1) != 1:
        raise InputError(
            f"{path}: decoder_sparse_step {config['decoder_sparse_step']}: layers without experts are not"
            " supported"
        )
    experts = config.get("num_experts", config.get("num_local_experts", 0))
    if experts < 1:
        raise InputError(f"{path}: config has no positive number of experts (found {experts!r})")
    return {
        "renormalise_experts": bool(config.get("norm_topk_prob")), **fields,
        "num_experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 0),
        "intermediate_size": config.get("moe_intermediate_size", fields["intermediate_size"]),
    }


def model_fields(path: Path, config: dict) -> dict:
    """Return the fields of ModelArgs that every LLaMA-like config states; absent keys have LLaMA's values.

    Raises InputError for anything that we would compute wrongly.
    """
    _refuse(path, config, "quantization_config", "mlp_bias", "use_sliding_window")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"{path}: hidden_act {config['hidden_act']!r} is not supported (only silu)")
    where = path if is_gguf(path) else path / CONFIG
    for name in NEEDED:
        if config.get(KEYS[name][0]) is None:
            raise InputError(f"{where}: {Wrong(KEYS[name][0], ABSENT, 'a whole number')}")
    fields = {name: config.get(key, default) for name, (key, default) in KEYS.items()}
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if "head_dim" not in config and hidden % heads:
        raise InputError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    _refuse_windows(path, config, fields["max_seq_len"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5 or 4
    scaling, longest = _rope_scaling(where, config, rope, fields["max_seq_len"])
    return fields | {
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", hidden // heads),
        "rope_base": rope.get("rope_theta", fields["rope_base"]), "rope_scaling": scaling,
        "max_seq_len": longest,
    }


def _refuse(path: Path, config: dict, *keys: str) -> None:
    """Raise InputError if one of these keys is set: each stands for something we would compute wrongly."""
    for key in keys:
        if config.get(key):
            raise InputError(f"{path}: {key} {json.dumps(config[key])[:60]} is not supported")


def _refuse_windows(path: Path, config: dict, longest: int) -> None:
    """Raise InputError if a sliding window would cut the context of any layer."""
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise InputError(f"{path}: layers with sliding-window attention are not supported")
    window = config.get("sliding_window")
    # Qwen2's configs carry a window that `use_sliding_window: false` switches off. Mistral's and Mixtral's
    # have no switch.
    if isinstance(window, int) and "use_sliding_window" not in config and window < longest:
        raise InputError(f"{path}: sliding_window {window} is not supported (the context is {longest})")


def _rope_scaling(path: Path, config: dict, rope: dict, longest: int) -> tuple[dict | None, int]:
    """(The field rope_scaling, the longest context after scaling). `rope`: the config's own parameters."""
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise InputError(f"{path}: rope parameters per kind of layer are not supported")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise InputError(f"{path}: partial_rotary_factor is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, longest
    others = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    scaling = {k: v for k, v in rope.items() if k not in others and v is not None}
    key = "original_max_position_embeddings"
    given = scaling.get(key, config.get(key))
    # Configs stretched linearly or by yarn often leave the length as it was before (Vicuna-16k, Qwen2.5's
    # instructions).
    grows = kind == "yarn" or (kind == "linear" and (given is not None or longest <= MOST_BEFORE_SCALING))
    original = longest if given is None else given
    if kind in ("linear", "yarn"):
        scaling[key] = original
    scaling = {"rope_type": kind, **scaling}
    with named(path):
        check_rope(scaling)
    if grows:
        longest = max(longest, int(original * scaling["factor"]))
    return {name: value for name, value in scaling.items() if name in {"rope_type", *ROPE[kind]}}, longest
