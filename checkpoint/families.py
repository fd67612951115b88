"""The families of targets: how their files name tensors and what their configs leave unsaid.

`ROWS` has one for each. Source: transformers' modelling files. GGUF files come under the same names
(`checkpoint.gguf`).
"""
from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from torch import Tensor

from checkpoint.folder import CONFIG, check_rope, is_gguf, rope_fields
from checkpoint.hybrid import hybrid_fields, rearranged
from checkpoint.source import Entry, Source
from common.errors import InputError
from common.schema import ABSENT, Wrong, named
from model import ModelArgs

# Our tensor: the source tensors that it is made of, stacked along the output dimension in this order. In the
# names {i} is the layer and {e} the expert; all experts follow each other.
NameTable = dict[str, list[str]]
# Fields of ModelArgs: Hugging Face's keys, and what an absent one means (None: the key is needed, or follows
# from others). Read by `model_fields`, written by `checkpoint.layouts: llama_config`.
KEYS = {
    "vocab_size": ("vocab_size", None), "hidden_size": ("hidden_size", None),
    "intermediate_size": ("intermediate_size", None), "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None), "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None), "norm_eps": ("rms_norm_eps", 1e-6), "rope_base": ("rope_theta", 10000.0),
    "rope_scaling": ("rope_scaling", None), "max_seq_len": ("max_position_embeddings", 2048),
    "tie_embeddings": ("tie_word_embeddings", False),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SCALES = "model.layers.0.mlp.experts.0.down_proj.scale"  # in files with experts in MXFP4
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
    "wo.bias": ["self_attn.o_proj.bias"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
}
DENSE: NameTable = {
    "mlp.w_gate_up.weight": [f"mlp.{x}_proj.weight" for x in ("gate", "up")],
    "mlp.w_down.weight": ["mlp.down_proj.weight"],
}
PHI3: NameTable = {  # stacked as ours are
    "wqkv.weight": ["self_attn.qkv_proj.weight"],
    "mlp.w_gate_up.weight": ["mlp.gate_up_proj.weight"],
    "mlp.w_down.weight": ["mlp.down_proj.weight"],
}
GEMMA3: NameTable = DENSE | {
    "wo_norm.weight": ["post_attention_layernorm.weight"],
    "mlp_norm.weight": ["pre_feedforward_layernorm.weight"],
    "mlp_out_norm.weight": ["post_feedforward_layernorm.weight"],
}
MIXTRAL: NameTable = {
    "mlp.router.weight": ["block_sparse_moe.gate.weight"],
    "mlp.w_gate_up": [f"block_sparse_moe.experts.{{e}}.{w}.weight" for w in ("w1", "w3")],
    "mlp.w_down": ["block_sparse_moe.experts.{e}.w2.weight"],
}
MIXTURE: NameTable = {"mlp.router.weight": ["mlp.gate.weight"]} | {
    f"mlp.{ours}{leaf}": [f"mlp.experts.{{e}}.{x}_proj.{theirs}" for x in parts]
    for ours, parts in (("w_gate_up", ("gate", "up")), ("w_down", ("down",)))
    for leaf, theirs in (("", "weight"), (".weight", "weight"), (".scale", "scale"))  # the latter two: MXFP4
}
GPT_OSS: NameTable = MIXTURE | {
    "sinks": ["self_attn.sinks"],
    **{f"mlp.router.{leaf}": [f"mlp.router.{leaf}"] for leaf in ("weight", "bias")},
    "mlp.gate_up_bias": [f"mlp.experts.{{e}}.{x}_proj.bias" for x in ("gate", "up")],
    "mlp.down_bias": ["mlp.experts.{e}.down_proj.bias"],
}
HYBRID: NameTable = {  # the names that `checkpoint.hybrid` gives to tensors
    "wqkv.weight": [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "gate")],
    "w_in.weight": [f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")],
    "w_out.weight": ["linear_attn.out_proj.weight"],
    "taps": ["linear_attn.conv1d.weight"],
    "log_decay": ["linear_attn.A_log"],
    "step_bias": ["linear_attn.dt_bias"],
    "out_scale": ["linear_attn.norm.weight"],
}
SHARED_EXPERT: NameTable = {
    **{name.replace("mlp.", "mlp.routed."): sources for name, sources in MIXTURE.items()},
    "mlp.shared.w_gate_up.weight": [f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up")],
    "mlp.shared.w_down.weight": ["mlp.shared_expert.down_proj.weight"],
    "mlp.gate.weight": ["mlp.shared_expert_gate.weight"],
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
    experts: range | tuple[None] = (None,)
    if "{e}" in patterns[0]:
        experts, shape = range(shape[0]), shape[1:]
    sources = [pattern.format(i=layer and layer[0], e=e) for e in experts for pattern in patterns]
    if len(patterns) == 1:
        rows = shape[:1]
    elif ".w_in." in name:
        values = args.delta_heads * args.delta_value_dim
        rows = args.delta_width, values, args.delta_heads, args.delta_heads
    elif ".wqkv." in f".{name}":  # q, k, v, and of hybrids the gate
        width, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
        rows = (width, kv, kv, width)[: len(patterns)]
    else:  # w_gate_up
        rows = (args.shared_expert_size if ".shared." in name else args.intermediate_size,) * 2
    return {source: (count, *shape[1:]) for source, count in zip(sources, rows * len(experts), strict=True)}


def hugging_face(mlp: NameTable) -> NameTable:
    """The table of a Hugging Face model whose layers have this kind of MLP, and what else differs."""
    layer = ATTENTION | mlp | {"attn_norm.weight": ["input_layernorm.weight"]}
    return {
        "embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"], **with_prefix(layer, "layers.{i}.", "model.layers.{i}."),
    }


@dataclass(frozen=True)
class Family:
    """The properties that all targets of one architecture share.

    fixed: fields of ModelArgs that the architecture implies. defaults: values of config keys that a config
    may leave out, where they differ from LLaMA's. experts: whether the MLPs are mixtures of experts. only:
    the values that keys of a config must have if they are there. in_turn: see `_experts_apart`. hybrid:
    whether most layers are gated delta nets, and files hold tensors that are to be rearranged.
    """

    names: NameTable
    fixed: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    experts: bool = False
    only: dict = field(default_factory=dict)
    in_turn: bool = False
    hybrid: bool = False

    def rearranged(self, source: Source, fields: dict) -> dict[str, Entry]:
        """Return the source's tensors under the names of the table. fields: of `target_fields`."""
        tensors = _experts_apart(source.tensors, self.in_turn) if self.experts else dict(source.tensors)
        tiled = source.family in TILED
        return rearranged(source.path, fields, tensors, tiled) if self.hybrid else tensors


def _experts_apart(tensors: dict[str, Entry], in_turn: bool) -> dict[str, Entry]:
    """Take stacks of experts apart, and gate from up.

    in_turn: an output of gate and one of up alternate, and matrices of 16 bits are transposed (gpt-oss). In
    MXFP4 every 32 inputs have 16 bytes in `_blocks`, two values in each, and an exponent in `_scales`.
    """
    def of_expert(stack: Entry, e: int, rows: slice, transposed: bool) -> Tensor:
        x = stack.read()[e]
        return x.T[rows] if transposed else x[rows].flatten(1) if x.ndim > 1 else x[rows]

    found = {}
    for name, stack in tensors.items():
        part = re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj(?:_(block|scale|bias)s?)?", name)
        if not part or len(stack.shape) < 2:
            found[name] = stack
            continue
        prefix, kind, leaf = part.groups()
        (count, *shape), transposed = stack.shape, in_turn and not leaf
        shape = shape[::-1] if transposed else [shape[0], math.prod(shape[1:])][: len(shape)]
        half = shape[0] // 2
        gate_up = (slice(0, None, 2), slice(1, None, 2)) if in_turn else (slice(half), slice(half, None))
        kinds = {"down": slice(None)} if kind == "down" else dict(zip(("gate", "up"), gate_up))
        last = leaf if leaf in ("scale", "bias") else "weight"
        for e, (own, rows) in product(range(count), kinds.items()):
            size = len(range(*rows.indices(shape[0])))
            read = partial(of_expert, stack, e, rows, transposed)
            found[f"{prefix}{e}.{own}_proj.{last}"] = Entry.of((size, *shape[1:]), stack.dtype, read)
    return found


# Qwen's windows have a switch, off unless a config says otherwise, and begin at a layer. LLaMA has none.
NO_WINDOW = {"use_sliding_window": False, "max_window_layers": 28}
GEMMA3_FIXED = dict.fromkeys(("qk_norm", "zero_centred", "output_norms", "scaled_embedding"), True)
# Published configs leave out all that transformers' class has by default.
GEMMA3_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096, "sliding_window_pattern": 6,
}
MTP: NameTable = {
    "fc.weight": ["mtp.fc.weight"], "norm.weight": ["mtp.norm.weight"],
    "embed_norm.weight": ["mtp.pre_fc_norm_embedding.weight"],
    "feature_norm.weight": ["mtp.pre_fc_norm_hidden.weight"],
}
MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS_FIXED = {"activation": "clamped_swiglu", "renormalise_experts": True} | dict.fromkeys(
    ("qkv_bias", "biases", "sinks"), True
)
GPT_OSS_DEFAULTS = {
    "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "max_position_embeddings": 131072, "sliding_window": 128, "sliding_window_pattern": 2,
    "num_local_experts": 128, "num_experts_per_tok": 4,
}
HYBRID_FIXED = {"qk_norm": True, "zero_centred": True}
HYBRID_DEFAULTS = {
    "head_dim": 256, "norm_topk_prob": True, "shared_expert_intermediate_size": 512, **NO_WINDOW,
}
ROWS = {  # architectures and model types of configs, and of GGUF files: the family
    "LlamaForCausalLM llama gguf:llama": Family(hugging_face(DENSE), defaults=NO_WINDOW),
    "MistralForCausalLM mistral": Family(
        hugging_face(DENSE), defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM qwen2 gguf:qwen2": Family(hugging_face(DENSE), {"qkv_bias": True}, NO_WINDOW),
    "Qwen3ForCausalLM qwen3 gguf:qwen3": Family(
        hugging_face(DENSE), {"qk_norm": True}, {"head_dim": 128, **NO_WINDOW}),
    "MixtralForCausalLM mixtral": Family(
        hugging_face(MIXTRAL), {"renormalise_experts": True}, MIXTRAL_DEFAULTS, experts=True),
    "gguf:llama+experts": Family(
        hugging_face(MIXTURE), {"renormalise_experts": True}, MIXTRAL_DEFAULTS | NO_WINDOW, experts=True),
    "Qwen3MoeForCausalLM qwen3_moe gguf:qwen3moe+experts": Family(
        hugging_face(MIXTURE), {"qk_norm": True}, {"norm_topk_prob": False, **NO_WINDOW}, experts=True),
    "Phi3ForCausalLM phi3 gguf:phi3": Family(
        hugging_face(PHI3), defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration gemma3_text gemma3 gguf:gemma3": Family(
        hugging_face(GEMMA3), GEMMA3_FIXED, GEMMA3_DEFAULTS),
    "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration qwen3_5_text qwen3_5 gguf:qwen35": Family(
        hugging_face(DENSE | HYBRID), HYBRID_FIXED, HYBRID_DEFAULTS, hybrid=True),
    "Qwen3NextForCausalLM qwen3_next gguf:qwen3next+experts"
    " Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration qwen3_5_moe_text qwen3_5_moe"
    " gguf:qwen35moe+experts": Family(
        hugging_face(SHARED_EXPERT | HYBRID), HYBRID_FIXED, HYBRID_DEFAULTS, experts=True, hybrid=True),
    "GptOssForCausalLM gpt_oss gguf:gpt-oss+experts": Family(
        hugging_face(GPT_OSS), GPT_OSS_FIXED, GPT_OSS_DEFAULTS, experts=True,
        only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, in_turn=True),
}
FAMILIES = {name: family for names, family in ROWS.items() for name in names.split()}
TILED = "gguf:qwen35", "gguf:qwen35moe+experts"  # heads of values are tiled over those of keys there


def mtp_names(names: NameTable) -> NameTable:
    """Return the table of the MTP layer of a target with this table."""
    prefix, theirs = "layers.{i}.", "model.layers.{i}."
    layer = {name: sources for name, sources in names.items() if name.startswith(prefix)}
    return MTP | {
        "layer." + name.removeprefix(prefix): ["mtp.layers.0." + s.removeprefix(theirs) for s in sources]
        for name, sources in layer.items()
    }


def family_of(path: Path, name: str | None) -> Family:
    """Return the entry of `FAMILIES` of this name. path: the source, for the InputError if there is none."""
    if name not in FAMILIES:
        raise InputError(f"{path}: unknown architecture {name!r} (known: {', '.join(FAMILIES)})")
    return FAMILIES[name]


def target_fields(source: Source) -> dict:
    """The fields of ModelArgs, from the source's config and what its family implies.

    Raises InputError for anything that we would compute wrongly.
    """
    family, path = family_of(source.path, source.family), source.path
    _refuse(path, source.config, "attn_logit_softcapping", "final_logit_softcapping",
            "use_bidirectional_attention", *(() if family.fixed.get("biases") else ("attention_bias",)))
    # A default stands in for an absent key only: an explicit null means LLaMA's value.
    config = {k: v for k, v in {**family.defaults, **source.config}.items() if v is not None}
    for key, value in (family.only | ({"decoder_sparse_step": 1} if family.experts else {})).items():
        if config.get(key, value) != value:
            raise InputError(f"{path}: {key} {config[key]} is not supported; expected {value}")
    if family.experts and config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        del config["quantization_config"]
    more = {}
    if family.hybrid:
        config, more = hybrid_fields(path, config)
        more["shared_expert_size"] *= family.experts
    if family.experts and "moe_intermediate_size" in config:  # Qwen3.5's mixtures name no other
        config.setdefault("intermediate_size", config["moe_intermediate_size"])
    fields = model_fields(path, config)
    fields |= family.fixed | more
    if not family.experts:
        return fields
    _refuse(path, config, "mlp_only_layers", "use_sliding_window")
    return {
        "renormalise_experts": bool(config.get("norm_topk_prob")), **fields,
        "num_experts": config.get("num_experts", config.get("num_local_experts", 0)),
        "experts_per_token": config.get("num_experts_per_tok", 0),
        "intermediate_size": config.get("moe_intermediate_size", fields["intermediate_size"]),
    }


def model_fields(path: Path, config: dict) -> dict:
    """Return the fields of ModelArgs that every LLaMA-like config states; absent keys have LLaMA's values.

    Raises InputError for anything that we would compute wrongly.
    """
    _refuse(path, config, "quantization_config", "mlp_bias")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: activation {activation!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    where = path if is_gguf(path) else path / CONFIG
    for name in NEEDED:
        if config.get(KEYS[name][0]) is None:
            raise InputError(f"{where}: {Wrong(KEYS[name][0], ABSENT, 'a whole number')}")
    fields = {name: config.get(key, default) for name, (key, default) in KEYS.items()}
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5 or 4
    rope, local = _rope_of_kinds(path, config, rope)
    scaling, longest = _rope_scaling(where, config, rope, fields["max_seq_len"])
    special = {  # in few families: other configs are left as they were
        "windows": _windows(where, config, fields["num_layers"], longest if local is None else math.inf),
        "local_rope_base": local, "query_scalar": config.get("query_pre_attn_scalar"),
        "activation": ACTIVATIONS[activation] if ACTIVATIONS[activation] != "silu" else None,
    }
    return fields | {name: value for name, value in special.items() if value} | {
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


def _windows(path: Path, config: dict, layers: int, longest: float) -> list[int]:
    """Return the field windows; [] if no layer has a window that a text of the length `longest` exceeds."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else 0
    if kinds := config.get("layer_types"):
        if {*kinds} == {"full_attention"}:
            return []
        if {*kinds} - {"full_attention", "sliding_attention"} or len(kinds) < layers or not window:
            raise InputError(f"{path}: layer_types { {*kinds} } with a window of {window}; expected for"
                             f" each of {layers} layers full_attention or, with a window, sliding_attention")
        full = [kind == "full_attention" for kind in kinds[:layers]]
    else:
        first, period = config.get("max_window_layers", 0), config.get("sliding_window_pattern", layers + 1)
        full = [i < first or (i + 1) % period == 0 for i in range(layers)]
    seen = [0 if all_of_it else window or 0 for all_of_it in full]
    return seen if any(0 < n < longest for n in seen) else []


def _rope_of_kinds(path: Path, config: dict, rope: dict) -> tuple[dict, float | None]:
    """(The parameters of layers without a window, the base of those with one if it is another)."""
    local = config.get("rope_local_base_freq")
    if not any(isinstance(v, dict) for v in rope.values()):
        return rope, local
    full, sliding = (rope.get(kind) for kind in ("full_attention", "sliding_attention"))
    if not full or not sliding or sliding.get("rope_type", "default") != "default":
        raise InputError(f"{path}: rope parameters of kinds of layers other than full_attention and, without"
                         " scaling, sliding_attention")
    return full, sliding.get("rope_theta", local)


def _rope_scaling(path: Path, config: dict, rope: dict, longest: int) -> tuple[dict | None, int]:
    """(The field rope_scaling, the longest context after scaling). `rope`: the config's own parameters."""
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise InputError(f"{path}: partial_rotary_factor is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, longest
    others = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    scaling = {k: v for k, v in rope.items() if k not in others and v is not None}
    if kind in ("longrope", "su"):
        return _longrope(path, config, scaling, longest), longest
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
    known = {"rope_type", *rope_fields(kind)}
    return {name: value for name, value in scaling.items() if name in known}, longest


def _longrope(path: Path, config: dict, scaling: dict, longest: int) -> dict:
    """The field rope_scaling of longrope."""
    original = config.get("original_max_position_embeddings") or longest
    original = scaling.get("original_max_position_embeddings", original)
    factor = scaling.get("factor") or longest / original
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_type": "divisors", "divisors": scaling["short_factor"], "long_divisors": scaling["long_factor"],
        "original_max_position_embeddings": original,
        "attention_factor": scaling.get("attention_factor") or stretched,
    }
