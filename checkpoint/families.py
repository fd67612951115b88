"""Table of all model families: tensor names, config defaults.

`ROWS` has one entry per family. Source: transformers' modeling files. `checkpoint.gguf` maps GGUF files to
the same names.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

SCALES = "model.layers.0.mlp.experts.0.down_proj.scale"  # present if experts are in MXFP4
ATTENTION = {name: sources for name, sources in LAYER.items() if not name.startswith("mlp.")}
PHI3, OLMO, GEMMA, GLM, GLM4, GRANITE4, MIXTRAL, MIXTURE, GPT_OSS, SHARED_EXPERT, HYBRID = map(name_table, (
    "phi3", "olmo", "gemma", "glm", "glm4", "granite4", "mixtral", "mixture", "gpt_oss", "shared_expert",
    "delta_net"))


@dataclass(frozen=True)
class Family:
    """A model family.

    names: table of tensor names. fixed: fields of ModelArgs that the architecture implies. defaults:
    values of keys that a config may omit, where they differ from LLaMA's. stacks: see
    `checkpoint.dense: parts_of`. renamed: other keys of the config.
    experts: the MLPs are mixtures of experts. required: values that config keys must have if they are set.
    interleaved: see `_split_experts`. hybrid: most layers are Gated DeltaNet; `checkpoint.hybrid` reorders
    their tensors. neighbors: rotary pairs are neighboring channels.
    local_unscaled: RoPE scaling is of layers without a sliding window. mtp: an MTP layer is read, as of all
    hybrids. read(path, config): returns the config without what `model_fields` does not know, and further
    fields. change(path, fields, tensors): returns the tensors under the names of the table.
    """

    architecture: str  # class in transformers
    names: NameTable
    fixed: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    stacks: dict = field(default_factory=lambda: STACKS)
    renamed: dict = field(default_factory=dict)
    experts: bool = False
    required: dict = field(default_factory=dict)
    interleaved: bool = False
    hybrid: bool = False
    neighbors: bool = False
    local_unscaled: bool = False
    mtp: bool = False
    read: Callable[[Path, dict], tuple[dict, dict]] | None = None
    change: Callable[[Path, dict, dict[str, Entry]], dict[str, Entry]] | None = None

    def config(self, source: Source) -> dict:
        """Return the source's config with the family's defaults; an explicit null means LLaMA's value."""
        config = {k: v for k, v in {**self.defaults, **source.config}.items() if v is not None}
        config |= {ours: config[theirs] for theirs, ours in self.renamed.items() if theirs in config}
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
        """Return the fields of ModelArgs. Raises InputError for anything that we would compute wrongly."""
        config = RecordedConfig(self.config(source))
        fields = self._read_fields(source, config)
        reject_unread(source.path, config, (*self.defaults, *self.renamed))
        return fields

    def _read_fields(self, source: Source, config: RecordedConfig) -> dict:
        path = source.path
        biased = self.fixed.get("biases") or self.fixed.get("qkv_bias") or self.neighbors
        if config.get("use_bidirectional_attention") != "vision":  # which is that of images
            reject(path, config, "use_bidirectional_attention")
        if config.get("attention_bias") and not biased:
            reject(path, config, "attention_bias")
        for key, value in self.required.items():
            if config.get(key, value) != value:
                raise InputError(f"{path}: {key} {config[key]} is not supported; expected {value}")
        config, more = self.read(path, config) if self.read else (config, {})
        if self.neighbors:  # some GLM have biases
            more["qkv_bias"] = any(name.endswith("self_attn.q_proj.bias") for name in source.tensors)
        if self.hybrid:
            more["shared_expert_size"] *= self.experts
        if self.experts and "moe_intermediate_size" in config:  # Qwen3.5's mixtures name no other
            config.setdefault("intermediate_size", config["moe_intermediate_size"])
        fields = model_fields(path, config) | self.fixed | more | _unrotated(config)
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
        """Return the source's tensors under the names of the table. config: ours; may get more keys."""
        found = self._all_tensors(source, config)
        if SCALES in found:
            config["quantization"] = Scheme(None, 0, None, MXFP4).to_config()
        return {name: entry for name, entry in found.items() if not (self._has_mtp and name.startswith(MTP))}

    @property
    def _has_mtp(self) -> bool:
        return self.hybrid or self.mtp

    def _all_tensors(self, source: Source, config: dict) -> dict[str, Entry]:
        tensors = _text_part(source.tensors) if "text_config" in source.config else source.tensors
        tensors = {  # taps of convolutions [H, 1, taps] -> [H, taps]
            name: entry.changed(lambda x: x[:, 0], (entry.shape[0], entry.shape[2]))
            if re.search(r"conv(1d)?\.weight$", name) and len(entry.shape) == 3 else entry
            for name, entry in _split_experts(tensors, self.interleaved).items()}
        if self.hybrid:
            return rearranged(source.path, config, tensors, source.architecture in TILED)
        if self.change:
            return self.change(source.path, config, tensors)
        reorder = self.neighbors or config.get("rotary_dim")
        return reordered(tensors, config, self.neighbors) if reorder else tensors

    def mtp_layer(self, source: Source, config: dict) -> tuple[dict, dict[str, Entry]]:
        """Return the config of the MTP layer that a target carries, and its tensors; {} if it has none."""
        found = self._all_tensors(source, config) if self._has_mtp else {}
        left_out = "delta_", "stop_ids", "bos_id", "architecture"
        own = {"delta_layers": [0]} if self.hybrid else {"dense_layers": 0}
        fields = {k: v for k, v in config.items() if not k.startswith(left_out)} | own | {
            "kind": "mtp", "num_layers": 1, "target_hidden_size": config["hidden_size"],
            "draft_vocab_size": config["vocab_size"], "aux_layers": [config["num_layers"]],
            "own_embedding": False, "own_lm_head": False, "tie_embeddings": False,
        }
        return fields, {name: entry for name, entry in found.items() if name.startswith(MTP)}


def _text_part(tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the text part of a vision-language model, under the names of a text model."""
    def renamed(name: str) -> str:
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name.removeprefix("thinker."))
        return name.replace("model.lm_head.", "lm_head.")

    own = r"(thinker\.)?(lm_head|model\.(embed_tokens|layers|norm))\."
    text = re.compile(rf"(model\.)?language_model\.|{own}|mtp\.")
    return {renamed(name): entry for name, entry in tensors.items() if text.match(name)}


def _unrotated(config: dict) -> dict:
    """Return the field of layers without RoPE, of SmolLM3 and Granite 4."""
    layers = config.get("num_hidden_layers", 0)
    rotated = config.get("no_rope_layers")
    if rotated is None and (interval := config.get("no_rope_layer_interval")):
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if config.get("position_embedding_type", "rope") != "rope":
        rotated = [0] * layers
    unrotated = [1 - int(one) for one in (rotated or ())[:layers]]
    return {"unrotated_layers": unrotated} if any(unrotated) else {}


def _split_experts(tensors: dict[str, Entry], interleaved: bool) -> dict[str, Entry]:
    """Split stacked experts into one tensor for each expert, and gate_up into gate and up.

    interleaved: rows of gate and up alternate, and 16-bit matrices are transposed (gpt-oss). In MXFP4 every
    32 inputs have 16 bytes in `_blocks`, two values in each, and an exponent in `_scales`.
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
        (count, *shape), transposed = stack.shape, interleaved and not leaf
        shape = shape[::-1] if transposed else [shape[0], math.prod(shape[1:])][: len(shape)]
        half = shape[0] // 2
        gate_up = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
        kinds = {"down": slice(None)} if kind == "down" else dict(zip(("gate", "up"), gate_up))
        last = leaf if leaf in ("scale", "bias") else "weight"
        for e, (own, rows) in product(range(count), kinds.items()):
            size = len(range(*rows.indices(shape[0])))
            read = partial(of_expert, stack, e, rows, transposed)
            found[f"{prefix}{e}.{own}_proj.{last}"] = Entry((size, *shape[1:]), stack.dtype, read)
    return found


# Qwen has a switch for sliding windows, off by default, and a first layer that has one; LLaMA has none.
NO_WINDOW = DEFAULTS["no_window"]
GEMMA_FIXED = dict.fromkeys(("zero_centred", "output_norms", "scaled_embedding"), True)
# Published configs omit whatever is a default of transformers' class.
GEMMA2_DEFAULTS, GEMMA3_DEFAULTS, GEMMA4_DEFAULTS, GLM_DEFAULTS, MIXTRAL_DEFAULTS, GPT_OSS_DEFAULTS = map(
    DEFAULTS.get, ("gemma2", "gemma3", "gemma4", "glm", "mixtral", "gpt_oss"))
MTP = "mtp."  # prefix of tensors
MTP_NAMES = name_table("mtp")
GPT_OSS_FIXED = {"activation": "clamped_swiglu", "renormalise_experts": True} | dict.fromkeys(
    ("qkv_bias", "biases", "sinks"), True
)
HYBRID_FIXED = {"qk_norm": True, "zero_centred": True}
HYBRID_DEFAULTS = DEFAULTS["hybrid"]


def _family(names: NameTable, fixed: dict | None = None, defaults: dict | None = None, **more) -> Family:
    table = hugging_face(ATTENTION | names)
    return Family(more.pop("architecture", ""), table, fixed or {}, defaults or {}, **more)


GEMMA4 = _family(
    name_table("gemma", "gemma4"), GEMMA_FIXED | {"qk_norm": True, "zero_centred": False}, GEMMA4_DEFAULTS,
    read=gemma4.gemma4_fields, change=gemma4.without_unused)
GEMMA4 = replace(GEMMA4, names=GEMMA4.names | name_table("gemma4_model"))
DELTA_MIXTURE = _family(
    SHARED_EXPERT | HYBRID, HYBRID_FIXED, HYBRID_DEFAULTS, stacks=DELTA_STACKS, experts=True, hybrid=True,
    read=hybrid_fields)
LFM2 = Family(
    "", short_conv.NAMES, {}, DEFAULTS["lfm2"],
    renamed={"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size",
                "tie_embedding": "tie_word_embeddings"},
    required={"block_use_swiglu": True, "use_pos_enc": True}, read=short_conv.conv_fields)
ROWS = {  # class in transformers, other classes and model types of configs and of GGUF files: the family
    "LlamaForCausalLM llama gguf:llama": _family(LAYER, defaults=NO_WINDOW),
    "Qwen2ForCausalLM qwen2 gguf:qwen2 Qwen2_5_VLForConditionalGeneration qwen2_5_vl gguf:qwen2vl": _family(
        LAYER, {"qkv_bias": True}, NO_WINDOW),
    "Qwen3ForCausalLM qwen3 gguf:qwen3": _family(LAYER, {"qk_norm": True}, {"head_dim": 128} | NO_WINDOW),
    "MistralForCausalLM mistral MinistralForCausalLM ministral Mistral3ForConditionalGeneration"
    " mistral3": _family(
        LAYER, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Ministral3ForCausalLM ministral3 gguf:mistral3": _family(LAYER, defaults={"head_dim": 128}),
    "Qwen3VLForConditionalGeneration qwen3_vl qwen3_vl_text gguf:qwen3vl": _family(
        LAYER, {"qk_norm": True}, {"head_dim": 128}),
    "SmolLM3ForCausalLM smollm3 gguf:smollm3": _family(LAYER, defaults={
        "num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4, "tie_word_embeddings": True, "use_sliding_window": False}),
    "Olmo2ForCausalLM olmo2 Olmo3ForCausalLM olmo3 gguf:olmo2": _family(
        OLMO, dict.fromkeys(("output_norms", "only_output_norms", "wide_qk_norm"), True),
        {"rms_norm_eps": 1e-5}, local_unscaled=True),
    "GraniteForCausalLM granite gguf:granite": _family(LAYER),
    "GraniteMoeHybridForCausalLM granitemoehybrid": _family(
        GRANITE4 | mamba.LAYER, required={"num_local_experts": 0, "normalization_function": "rmsnorm"},
        renamed={"shared_intermediate_size": "intermediate_size"},
        read=mamba.mamba_fields, change=mamba.in_our_order),
    "GlmForCausalLM glm": _family(GLM, {}, GLM_DEFAULTS, neighbors=True),
    "Glm4ForCausalLM glm4 gguf:glm4": _family(
        GLM4, {"output_norms": True}, GLM_DEFAULTS, neighbors=True),
    "MixtralForCausalLM mixtral": _family(
        MIXTRAL, {"renormalise_experts": True}, MIXTRAL_DEFAULTS, experts=True),
    "gguf:llama+experts": _family(
        MIXTURE, {"renormalise_experts": True}, MIXTRAL_DEFAULTS | NO_WINDOW, experts=True,
        architecture="MixtralForCausalLM"),
    "Qwen3MoeForCausalLM qwen3_moe gguf:qwen3moe+experts": _family(
        MIXTURE, {"qk_norm": True}, {"norm_topk_prob": False, **NO_WINDOW}, experts=True,
        required={"use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    "Qwen3VLMoeForConditionalGeneration qwen3_vl_moe Qwen3OmniMoeForConditionalGeneration"
    " gguf:qwen3vlmoe+experts": _family(
        MIXTURE, {"qk_norm": True}, {"norm_topk_prob": True, "head_dim": 128, **NO_WINDOW}, experts=True,
        required={"use_qk_norm": True, "shared_expert_intermediate_size": 0}),
    "Phi3ForCausalLM phi3 gguf:phi3": _family(
        PHI3, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 1}),
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration gemma3_text gemma3 gguf:gemma3": _family(
        GEMMA, GEMMA_FIXED | {"qk_norm": True}, GEMMA3_DEFAULTS),
    "Gemma4ForConditionalGeneration gemma4 Gemma4ForCausalLM gemma4_text"
    " Gemma4UnifiedForConditionalGeneration gemma4_unified Gemma4UnifiedForCausalLM gemma4_unified_text"
    " gguf:gemma4 gguf:gemma4+experts": GEMMA4,
    "Gemma2ForCausalLM gemma2 gguf:gemma2": _family(GEMMA, GEMMA_FIXED, GEMMA2_DEFAULTS),
    "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration qwen3_5_text qwen3_5 gguf:qwen35": _family(
        LAYER | HYBRID, HYBRID_FIXED, HYBRID_DEFAULTS, stacks=DELTA_STACKS, hybrid=True,
        read=hybrid_fields),
    "Qwen3NextForCausalLM qwen3_next gguf:qwen3next+experts": DELTA_MIXTURE,
    "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration qwen3_5_moe_text qwen3_5_moe"
    " gguf:qwen35moe+experts": DELTA_MIXTURE,
    "Lfm2ForCausalLM lfm2 Lfm2VlForConditionalGeneration lfm2_vl gguf:lfm2": LFM2,
    "Lfm2MoeForCausalLM lfm2_moe gguf:lfm2moe+experts": replace(
        LFM2, experts=True, required=LFM2.required | {"use_expert_bias": True, "expert_gating_func": 2},
        defaults=LFM2.defaults | {"block_auto_adjust_ff_dim": False, "norm_topk_prob": True}),
    "Glm4MoeLiteForCausalLM glm4_moe_lite gguf:deepseek2+experts": _family(
        SHARED_EXPERT | latent.LAYER | {"mlp.w_gate_up.weight": LAYER["mlp.w_gate_up.weight"],
                                        "mlp.w_down.weight": LAYER["mlp.w_down.weight"]},
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1, "norm_topk_prob": True},
        renamed={"n_routed_experts": "num_experts"}, required={
            "n_group": 1, "rope_interleave": True, "topk_method": "noaux_tc", "partial_rotary_factor": 1,
            "expert_gating_func": 2},
        experts=True, mtp=True, stacks=latent.LATENT_STACKS, read=latent.latent_fields,
        change=latent.in_our_order),
    "GptOssForCausalLM gpt_oss gguf:gpt-oss+experts": _family(
        GPT_OSS, GPT_OSS_FIXED, GPT_OSS_DEFAULTS, experts=True,
        required={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}, interleaved=True),
}
FAMILIES = {
    name: replace(family, architecture=family.architecture or (name if "For" in name else names.split()[0]))
    for names, family in ROWS.items() for name in names.split()
}
FOLDER = "is read from its Hugging Face folder only; name that, or its hub id"
REFUSED = {  # patterns of such names: why they are not supported
    r"(gguf:)?nemotron_?h.*": "Nemotron-H is not supported: layers with one mixer, MLPs and experts without a"
                              " gate are missing (its Mamba-2 layers are supported)",
    r"gguf:granitehybrid.*": f"Granite 4 H {FOLDER}", "gguf:chatglm": f"GLM-4-9B of 2024 {FOLDER}",
}
TILED = "gguf:qwen35", "gguf:qwen35moe+experts"  # value heads are tiled over key heads there


def mtp_names(names: NameTable) -> NameTable:
    """Return the table of the MTP layer of a target with this table."""
    prefix, theirs = "layers.{i}.", "model.layers.{i}."
    layer = {name: sources for name, sources in names.items() if name.startswith(prefix)}
    return MTP_NAMES | {
        "layer." + name.removeprefix(prefix): ["mtp.layers.0." + s.removeprefix(theirs) for s in sources]
        for name, sources in layer.items()
    }


def family_of(path: Path, name: str | None) -> Family:
    """Return the entry of `FAMILIES` of this name. path: the source, for the InputError if there is none."""
    if why := next((why for names, why in REFUSED.items() if re.fullmatch(names, str(name).lower())), None):
        raise InputError(f"{path}: {why}")
    if name not in FAMILIES:
        raise InputError(f"{path}: unknown architecture {name!r} (known: {', '.join(FAMILIES)})")
    return FAMILIES[name]
