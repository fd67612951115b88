"""Model families: their config keys, defaults and tensor names.

families.json has one entry per family. Source: transformers' modeling files. `checkpoint.gguf` maps GGUF
files to the same names.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

from torch import Tensor

from checkpoint import gemma4, latent, mamba, short_conv
from checkpoint.configs import model_fields, reject
from checkpoint.dense import (
    DEFAULTS,
    LAYER,
    STACKS,
    NameTable,
    RecordedConfig,
    hugging_face,
    name_table,
    reject_unread,
    rope_of,
)
from checkpoint.hybrid import DELTA_STACKS, hybrid_fields, rearranged
from checkpoint.rotary import reordered
from checkpoint.source import Entry, Source
from common.errors import InputError
from kernels.quantized import MXFP4
from kernels.scheme import Scheme

MXFP4_SCALES = "model.layers.0.mlp.experts.0.down_proj.scale"  # present if experts are in MXFP4
ATTENTION = {name: sources for name, sources in LAYER.items() if not name.startswith("mlp.")}
MTP = "mtp."  # prefix of the MTP layer's tensors


@dataclass(frozen=True)
class Family:
    """A model family.

    names: table of tensor names. fixed: fields of ModelArgs that the architecture implies. defaults:
    values of keys that a config may omit, where they differ from LLaMA's. stacks: see
    `checkpoint.dense: parts_of`. llama_keys: LLaMA's name of each config key that the family renames.
    experts: the MLPs are mixtures of experts. required: values that config keys must have if they are set.
    interleaved_gate_up: see `_split_experts`. hybrid: most layers are Gated DeltaNet; `checkpoint.hybrid`
    reorders their tensors. interleaved_rope: rotary pairs are channels 2j and 2j + 1.
    local_unscaled: RoPE scaling applies only to layers without a sliding window. mtp: has an MTP layer, as
    all hybrids may. read(path, config): returns the config without keys unknown to `model_fields`, and
    further fields. convert_tensors(path, fields, tensors): returns the tensors under the names of the table.
    """

    architecture: str  # class in transformers
    names: NameTable
    fixed: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    stacks: dict = field(default_factory=lambda: STACKS)
    llama_keys: dict = field(default_factory=dict)
    experts: bool = False
    required: dict = field(default_factory=dict)
    interleaved_gate_up: bool = False
    hybrid: bool = False
    interleaved_rope: bool = False
    local_unscaled: bool = False
    mtp: bool = False
    read: Callable[[Path, dict], tuple[dict, dict]] | None = None
    convert_tensors: Callable[[Path, dict, dict[str, Entry]], dict[str, Entry]] | None = None

    def config(self, source: Source) -> dict:
        """Return the source's config with the family's defaults; null stands for LLaMA's value."""
        config = {k: v for k, v in {**self.defaults, **source.config}.items() if v is not None}
        config |= {ours: config[theirs] for theirs, ours in self.llama_keys.items() if theirs in config}
        if "text_config" in config:  # the language model of a multimodal model
            has_head = any(name.endswith("lm_head.weight") for name in source.tensors)
            config.setdefault("tie_word_embeddings", not has_head)
        rope = rope_of(config)
        if self.local_unscaled and config.get("sliding_window") and "full_attention" not in rope:
            base = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 1e4))}
            config |= {"rope_parameters": {"full_attention": base | rope, "sliding_attention": base}}
            config.pop("rope_scaling", None)
        return config

    def fields(self, source: Source) -> dict:
        """Return the fields of ModelArgs. Raises InputError on unsupported settings."""
        config = RecordedConfig(self.config(source))
        fields = self.read_fields(source, config)
        reject_unread(source.path, config, (*self.defaults, *self.llama_keys))
        return fields

    def read_fields(self, source: Source, config: RecordedConfig) -> dict:
        """Return the fields; `config` records the keys that are read. Raises InputError."""
        path = source.path
        biased = self.fixed.get("biases") or self.fixed.get("qkv_bias") or self.interleaved_rope
        if config.get("use_bidirectional_attention") != "vision":  # "vision" concerns image tokens only
            reject(path, config, "use_bidirectional_attention")
        if config.get("attention_bias") and not biased:
            reject(path, config, "attention_bias")
        for key, value in self.required.items():
            if config.get(key, value) != value:
                raise InputError(f"{path}: {key} {config[key]} is not supported; expected {value}")
        config, more = self.read(path, config) if self.read else (config, {})
        if self.interleaved_rope:  # GLM: some models have biases
            more["qkv_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in source.tensors)
        if self.hybrid and not self.experts:  # dense models have no shared expert
            more["shared_expert_size"] = 0
        if self.experts and "moe_intermediate_size" in config:  # Qwen3.5's MoE configs have only this one
            config.setdefault("intermediate_size", config["moe_intermediate_size"])
        fields = model_fields(path, config) | self.fixed | more | _nope_fields(config)
        if "rotary_dim" in fields and "partial_rotary_factor" not in self.defaults:
            raise InputError(f"{path}: partial_rotary_factor is not supported for this model")
        if not self.experts:
            return fields
        reject(path, config, "use_sliding_window")
        return {
            "renormalise_experts": bool(config.get("norm_topk_prob")), **fields,
            "num_experts": config.get("num_experts", config.get("num_local_experts", 0)),
            "experts_per_token": config.get("num_experts_per_tok", 0),
            "intermediate_size": config.get("moe_intermediate_size", fields["intermediate_size"]),
        }

    def tensors(self, source: Source, config: dict) -> dict[str, Entry]:
        """Return the source's tensors under the names of the table. config: ours, to which MXFP4 is added."""
        tensors = self._all_tensors(source, config)
        if MXFP4_SCALES in tensors:
            config["quantization"] = Scheme(None, 0, None, MXFP4).to_config()
        excluded = MTP if self.hybrid or self.mtp else ()
        return {name: entry for name, entry in tensors.items() if not name.startswith(excluded)}

    def _all_tensors(self, source: Source, config: dict) -> dict[str, Entry]:
        tensors = _text_part(source.tensors) if "text_config" in source.config else source.tensors
        tensors = {  # taps of convolutions [H, 1, taps] -> [H, taps]
            name: entry.changed(lambda x: x[:, 0], (entry.shape[0], entry.shape[2]))
            if re.search(r"conv(1d)?\.weight$", name) and len(entry.shape) == 3 else entry
            for name, entry in _split_experts(tensors, self.interleaved_gate_up).items()}
        if self.hybrid:
            return rearranged(source.path, config, tensors, source.architecture in TILED)
        if self.convert_tensors:
            return self.convert_tensors(source.path, config, tensors)
        reorder = self.interleaved_rope or config.get("rotary_dim")
        return reordered(tensors, config, self.interleaved_rope) if reorder else tensors

    def mtp_layer(self, source: Source, config: dict) -> tuple[dict, dict[str, Entry]]:
        """Return the config of the MTP layer that a target carries, and its tensors; {} if it has none."""
        tensors = self._all_tensors(source, config) if self.hybrid or self.mtp else {}
        target_only = "delta_", "stop_ids", "bos_id", "architecture"
        own = {"delta_layers": [0]} if self.hybrid else {"dense_layers": 0}
        fields = {k: v for k, v in config.items() if not k.startswith(target_only)} | own | {
            "kind": "mtp", "num_layers": 1, "target_hidden_size": config["hidden_size"],
            "draft_vocab_size": config["vocab_size"], "aux_layers": [config["num_layers"]],
            "own_embedding": False, "own_lm_head": False, "tie_embeddings": False,
        }
        return fields, {name: entry for name, entry in tensors.items() if name.startswith(MTP)}


def _text_part(tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the text part of a vision-language model, under the names of a text model."""
    def renamed(name: str) -> str:
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name.removeprefix("thinker."))
        return name.replace("model.lm_head.", "lm_head.")

    plain = r"(thinker\.)?(lm_head|model\.(embed_tokens|layers|norm))\."
    text = re.compile(rf"(model\.)?language_model\.|{plain}|mtp\.")
    return {renamed(name): entry for name, entry in tensors.items() if text.match(name)}


def _nope_fields(config: dict) -> dict:
    """Return the field of layers without RoPE (NoPE): SmolLM3, Granite 4."""
    layers = config.get("num_hidden_layers", 0)
    has_rope = config.get("no_rope_layers")  # 1: with RoPE, despite the name
    if has_rope is None and (interval := config.get("no_rope_layer_interval")):
        has_rope = [int((i + 1) % interval != 0) for i in range(layers)]
    if config.get("position_embedding_type", "rope") != "rope":
        has_rope = [0] * layers
    unrotated = [1 - int(one) for one in (has_rope or ())[:layers]]
    return {"unrotated_layers": unrotated} if any(unrotated) else {}


def _split_experts(tensors: dict[str, Entry], interleaved: bool) -> dict[str, Entry]:
    """Split stacked experts into one tensor for each expert, and gate_up into gate and up.

    interleaved: rows of gate and up alternate, and 16-bit matrices are transposed (gpt-oss). In MXFP4, each
    32 inputs have 16 bytes of two values in `_blocks` and an exponent in `_scales`.
    """
    def of_expert(stack: Entry, e: int, rows: slice, transposed: bool) -> Tensor:
        x = stack.read()[e]
        return x.T[rows] if transposed else x[rows].flatten(1) if x.ndim > 1 else x[rows]

    split = {}
    for name, stack in tensors.items():
        part = re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj(?:_(block|scale|bias)s?)?", name)
        if not part or len(stack.shape) < 2:
            split[name] = stack
            continue
        prefix, projection, leaf = part.groups()
        (count, *shape), transposed = stack.shape, interleaved and not leaf
        shape = shape[::-1] if transposed else [shape[0], math.prod(shape[1:])][: len(shape)]
        half = shape[0] // 2
        gate_up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
        rows_of = {"down": slice(None)} if projection == "down" else dict(zip(("gate", "up"), gate_up))
        last = leaf if leaf in ("scale", "bias") else "weight"
        for e, (own, rows) in product(range(count), rows_of.items()):
            size = len(range(*rows.indices(shape[0])))
            read = partial(of_expert, stack, e, rows, transposed)
            split[f"{prefix}{e}.{own}_proj.{last}"] = Entry((size, *shape[1:]), stack.dtype, read)
    return split


CODE = {  # further fields of families whose configs or tensors need code
    "gemma4": {"read": gemma4.gemma4_fields, "convert_tensors": gemma4.without_unused},
    "hybrid": {"stacks": DELTA_STACKS, "hybrid": True, "read": hybrid_fields},
    "latent": {
        "stacks": latent.LATENT_STACKS, "read": latent.latent_fields, "convert_tensors": latent.in_our_order},
    "mamba": {"read": mamba.mamba_fields, "convert_tensors": mamba.in_our_order},
    "short_conv": {"read": short_conv.conv_fields},
}


def _family(
    name: str, names: str, model: str = "", code: str = "", defaults: dict | None = None, **more
) -> Family:
    """Make the family of an entry of families.json.

    name: its architecture. names, model: tables of names.json for layers and for other tensors. defaults:
    "like" extends those of names.json. code: key of `CODE`.
    """
    table = hugging_face(ATTENTION | name_table(*names.split())) | name_table(*model.split())
    values = dict(defaults or {})
    for other in values.pop("like", "").split():
        values = DEFAULTS[other] | values
    return Family(**{"architecture": name, "names": table, "defaults": values} | CODE.get(code, {}) | more)


# By architecture and model type in config.json, and by gguf:ARCHITECTURE.
FAMILIES = {
    name: _family(name if "For" in name else names.split()[0], **row)
    for names, row in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
    for name in names.split()
}
EXPERTS = "Granite with experts is not supported; dense models are"
UNSUPPORTED = {  # patterns of architectures: why they are not supported
    r"(gguf:)?nemotron_?h.*": "Nemotron-H is not supported: its MLPs and experts have no gate, and its layers"
                              " have either attention, Mamba-2 or an MLP",
    r"granitemoe(shared)?for.*|gguf:granite.*\+experts": EXPERTS,
    "gguf:granitehybrid": "Granite 4 H is read from its Hugging Face folder only; pass that, or its hub id",
    "(gguf:)?chatglm.*": "GLM-4-9B of 2024 is read in transformers' layout only: zai-org/glm-4-9b-chat-hf",
}
TILED = "gguf:qwen35", "gguf:qwen35moe+experts"  # their value heads are tiled over key heads


def mtp_names(names: NameTable) -> NameTable:
    """Return the table of the MTP layer of a target with this table."""
    prefix, theirs = "layers.{i}.", "model.layers.{i}."
    layer = {name: sources for name, sources in names.items() if name.startswith(prefix)}
    return name_table("mtp") | {
        "layer." + name.removeprefix(prefix): ["mtp.layers.0." + s.removeprefix(theirs) for s in sources]
        for name, sources in layer.items()
    }


def family_of(path: Path, name: str | None) -> Family:
    """Return the entry of `FAMILIES` of this name. path: the source, for the InputError if there is none."""
    for pattern, why in UNSUPPORTED.items():
        if re.fullmatch(pattern, str(name).lower()):
            raise InputError(f"{path}: {why}")
    if name not in FAMILIES:
        raise InputError(f"{path}: unknown architecture {name!r} (known: {', '.join(FAMILIES)})")
    return FAMILIES[name]
