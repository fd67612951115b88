"""Dense LLaMA and Qwen targets, EAGLE-1 and EAGLE-3 heads: how published files name tensors and sizes."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from checkpoint.load import CONFIG
from checkpoint.source import Entry, Source
from checkpoint.writer import Planned
from common.errors import InputError
from common.schema import ABSENT, InvalidValue
from model import LLAMA3_ROPE_FIELDS, ModelArgs

# Our tensor: the source tensors that it is made of, stacked along the output dimension in this order. In the
# names {i} is the layer and {e} the expert; all experts follow each other.
NameTable = dict[str, list[str]]
# Source tensors of one layer, without its prefix. Draft heads use the same names.
LAYER: NameTable = {
    "wqkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "wqkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "q_norm.weight": ["self_attn.q_norm.weight"],
    "k_norm.weight": ["self_attn.k_norm.weight"],
    "wo.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.w_gate_up.weight": [f"mlp.{x}_proj.weight" for x in ("gate", "up")],
    "mlp.w_down.weight": ["mlp.down_proj.weight"],
}
# Fields of ModelArgs: Hugging Face's keys, and what an absent one means (None: the key is needed, or follows
# from others). Read by `dense_fields`, written by `checkpoint.export: llama_config`.
KEYS = {
    "vocab_size": ("vocab_size", None), "hidden_size": ("hidden_size", None),
    "intermediate_size": ("intermediate_size", None), "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None), "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None), "norm_eps": ("rms_norm_eps", 1e-6), "rope_base": ("rope_theta", 10000.0),
    "rope_scaling": ("rope_scaling", None), "max_seq_len": ("max_position_embeddings", 2048),
    "tie_embeddings": ("tie_word_embeddings", False),
}
NEEDED = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"
# Config keys that change the computation, of other architectures or of models built from these.
UNSUPPORTED = (
    "quantization_config", "mlp_bias", "clip_qkv", "logit_scale", "attention_chunk_size", "qk_layernorm",
    "alibi", "use_parallel_residual", "parallel_attn", "scale_emb", "logit_softcap", "router_softcap",
    "attention_scale", "lm_head_multiplier", "attn_temperature_tuning",
)
# Config keys that `dense_fields` ignores; if one is set, another module reads the config.
EXTRAS = (
    *UNSUPPORTED, "attention_bias", "use_sliding_window", "partial_rotary_factor", "attn_logit_softcapping",
    "final_logit_softcapping", "no_rope_layers", "no_rope_layer_interval", "attention_multiplier",
    "residual_multiplier", "embedding_multiplier", "logits_scaling",
)

# Config keys that may be ignored where no code reads them: training, generation and metadata; vision and
# audio; sizes that follow from other keys.
HARMLESS = re.compile(
    r"_.*|architectures|auto_map|cache_implementation|dtype|id2label|init_method|label2id|model_type"
    r"|pretraining_tp|torch_dtype|transformers_version|use_cache|tokenizer_class|task_specific.*"
    r"|(max|min)_length|do_sample|early_stopping|num_beam.*|num_return_sequences|temperature|top_[kp]|typical_p"
    r"|.*_penalty|.*no_repeat_ngram_size|bad_words_ids|.*suppress_tokens|return_dict.*|prefix"
    r"|output_(attentions|hidden_states|router_logits|past|scores)"
    r"|finetuning_task|problem_type|remove_invalid_values|is_decoder|torchscript|tf_legacy_loss"
    r"|enable_audio_output|.*initializer.*|.*xavier_init|.*init.*_(scale|std)|.*(dropout|pdrop)|.*aux_loss.*"
    r"|.*loss_coef|is_llama_config|transformers\.js_config|unsloth_\w+|neftune_\w+|medusa_\w+|max_sequence_length"
    r"|(base_model_)?name_or_path|attn_implementation|use_flash_attn|use_bfloat16|seq_length"
    r"|experts_per_token|initial_context_length|mtp_num_hidden_layers|mamba_ssm_dtype"
    r"|.*token_(id|index)|(text|thinker|talker|vision|audio|code2wav)_config|(vision|image|video|audio)_.*"
    r"|mm_.*|projector_.*|spd_type|multimodal_.*|spatial_merge_size|downsample_factor|pard.*"
    r"|block_dim|block_norm_eps|conv_dim|conv_dim_out|num_heads|mamba_chunk_size|qk_head_dim|head_dim"
    r"|router_jitter_noise|time_step_(min|max|floor)|dual_chunk_attention_config"
    r"|max_window_layers|no_rope_layer_interval|sliding_window(_size)?"
    r"|original_max_position_embeddings"
    r"|vocab_size_per_layer_input|num_nextn_predict_layers|topk_group|quantization_config")


class RecordedConfig(dict):
    """A config that records which of its keys are read, also through `config | changes`."""

    def __init__(self, config: dict, read: set[str] | None = None):
        super().__init__(config)
        self.read = set() if read is None else read

    def get(self, key: str, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str):
        self.read.add(key)
        return super().__getitem__(key)

    def __or__(self, other: dict) -> RecordedConfig:
        return RecordedConfig({**self, **other}, self.read)


def reject_unread(path: Path, config: RecordedConfig, known: Iterable[str] = ()) -> None:
    """Raise InputError if a key was not read, is not HARMLESS, and is not null, false, 0, 1 or empty.

    Also if attention is not causal, which such a key says by being false.
    known: keys to accept unread: those that the family has renamed, or has a default for.
    """
    off = None, False, 0, 1, "", [], {}
    if config.get("is_causal") is False:  # transformers 5 masks nothing then
        raise InputError(f"{path}: is_causal false is not supported")
    text = config.get("text_config") or config  # keys beside it are of images and sound
    unread = {
        key: value for key, value in config.items()
        if key in text and key not in config.read | {*known}
        and not HARMLESS.fullmatch(key) and (value is True or value not in off)}
    if unread:
        listed = ", ".join(f"{key} {json.dumps(value)[:60]}" for key, value in unread.items())
        raise InputError(f"{path}: {listed} is not supported: unknown to this program, and may change the"
                         f" computation; if not, delete it from {CONFIG}")


def with_prefix(table: NameTable, prefix: str, source_prefix: str) -> NameTable:
    """Return a table whose tensors have these prefixes, on our side and in the source."""
    return {prefix + name: [source_prefix + s for s in sources] for name, sources in table.items()}


def hugging_face(layer: NameTable) -> NameTable:
    """Return the table of a Hugging Face model whose layers have these tensors."""
    layer = layer | {"attn_norm.weight": ["input_layernorm.weight"]}
    return {
        "embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"], **with_prefix(layer, "layers.{i}.", "model.layers.{i}."),
    }


def qkv_rows(a: ModelArgs) -> tuple[int, ...]:
    """Return the rows of q, k, v, and of an output gate if there is one."""
    width, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return width, kv, kv, width


STACKS = {"wqkv.": qkv_rows}  # of our stacked tensors whose parts differ in size; others are cut evenly


def parts_of(
    names: NameTable, args: ModelArgs, name: str, shape: tuple[int, ...], stacks: dict = STACKS
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
    rows = (shape[0] // len(patterns),) * len(patterns)
    if len(patterns) > 1 and (stack := next((key for key in stacks if key in name), None)):
        rows = stacks[stack](args.of_layer(int(layer[0])) if hasattr(args, "of_layer") else args)
        rows = tuple(n for n, end in zip(rows, accumulate(rows)) if end <= shape[0])  # layers may lack values
    return {source: (count, *shape[1:]) for source, count in zip(sources, rows * len(experts))}


def dense_fields(where: Path, config: dict) -> dict:
    """Return the fields of ModelArgs that every LLaMA-like config states; absent keys have LLaMA's values.

    Raises InputError if a key is missing.
    """
    for name in NEEDED:
        if config.get(KEYS[name][0]) is None:
            raise InputError(f"{where}: {InvalidValue(KEYS[name][0], ABSENT, 'a whole number')}")
    fields = {name: config.get(key, default) for name, (key, default) in KEYS.items()}
    rope = rope_of(config)
    scaling = {"rope_type": "llama3"} | {k: v for k, v in rope.items() if k in LLAMA3_ROPE_FIELDS}
    return fields | {
        "num_kv_heads": config.get("num_key_value_heads", fields["num_heads"]),
        "head_dim": config.get("head_dim", fields["hidden_size"] // fields["num_heads"]),
        "rope_base": rope.get("rope_theta", fields["rope_base"]),
        "rope_scaling": scaling if rope_type(rope) == "llama3" else None,
    }


def rope_of(config: dict) -> dict:
    """Return the parameters of a config's RoPE, of transformers 5 or 4.

    If both keys are set, the older one counts, as in transformers 5: somebody added it for longer texts. It
    has no base; that of rope_parameters stays, where transformers 5.23 falls back to 10,000.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    if full := parameters.get("full_attention"):
        return parameters | {"full_attention": rope_of({"rope_parameters": full, "rope_scaling": scaling})}
    base = {key: parameters.get(key, config.get(key)) for key in ("rope_theta", "partial_rotary_factor")}
    given = {key: value for key, value in scaling.items() if value is not None}
    return {key: value for key, value in base.items() if value is not None} | given if given else parameters


def rope_type(rope: dict) -> str:
    """Return the type of the scaling in parameters of a RoPE."""
    return rope.get("rope_type", rope.get("type", "default"))


@dataclass(frozen=True)
class Family:
    """What the targets of one architecture share.

    names: the table of their tensors. fixed: fields of ModelArgs that the architecture implies. defaults:
    values of config keys that a config may leave out, where they differ from LLaMA's.
    renamed: other keys of the config.
    """

    architecture: str  # class in transformers
    names: NameTable
    fixed: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    stacks: dict = field(default_factory=lambda: STACKS)
    renamed: dict = field(default_factory=dict)

    def config(self, source: Source) -> dict:
        """Return the source's config with the family's defaults; an explicit null means LLaMA's value."""
        return {k: v for k, v in {**self.defaults, **source.config}.items() if v is not None}

    def fields(self, source: Source) -> dict:
        """Return the fields of ModelArgs. Raises InputError for anything that we would compute wrongly."""
        config = RecordedConfig(self.config(source))
        fields = self.read_fields(source, config)
        if source.path.suffix != ".gguf":
            reject_unread(source.path, config, (*self.defaults, *self.renamed))
        return fields

    def read_fields(self, source: Source, config: RecordedConfig) -> dict:
        """Return the fields as `fields` does, reading every key of the config that it knows."""
        config.read.update(("hidden_act", "layer_types"))  # see `is_plain`
        return dense_fields(source.path / CONFIG, config) | self.fixed

    def tensors(self, source: Source, config: dict) -> dict[str, Entry]:
        """Return the source's tensors under the names of the table. config: ours; a family may add keys."""
        return dict(source.tensors)

    def extra_parts(self, source: Source, config: dict, dtype: torch.dtype) -> Parts:
        """Return heads that a target carries, to be written into subfolders."""
        return {}


Parts = dict[str, tuple[dict, list[Planned]]]  # subfolder: its config.json and its tensors
DENSE = {family.architecture: family for family in (
    Family("LlamaForCausalLM", hugging_face(LAYER)),
    Family("Qwen2ForCausalLM", hugging_face(LAYER), {"qkv_bias": True}),
    Family("Qwen3ForCausalLM", hugging_face(LAYER), {"qk_norm": True}, {"head_dim": 128}),
)}


def is_plain(config: dict) -> bool:
    """Return whether `dense_fields` reads everything in a config that changes the computation."""
    return (
        rope_type(rope_of(config)) in ("default", "llama3") and not any(map(config.get, EXTRAS))
        and config.get("hidden_act", "silu") == "silu"
        and {*(config.get("layer_types") or ())} <= {"full_attention"}
    )


# Draft heads


@dataclass(frozen=True)
class HeadOptions:
    """Settings of a head that its files may leave open (flags of convert_checkpoint.py)."""

    aux_layers: tuple[int, ...] | None = None  # --aux-layers: target layers whose inputs feed the head
    norm_before_residual: bool | None = None  # --[no-]norm-before-residual
    recycle: str | None = None  # --recycle normed|raw


@dataclass(frozen=True)
class ReadHead:
    """A head as read from its source.

    config: the config.json that it becomes. names: the table of its tensors. tensors: the source's, under the
    names of that table, and `d2t`, `t2d` or `token_map`.
    """

    config: dict
    names: NameTable
    tensors: dict[str, Entry]


EAGLE: NameTable = {
    "embed.weight": ["embed_tokens.weight"],
    **{name: [name] for name in ("lm_head.weight", "fc.weight", "fc.bias")},
}
EAGLE1 = EAGLE | with_prefix(LAYER, "layer.", "layers.0.")
EAGLE3_LAYER = LAYER | {  # the first
    "embed_norm.weight": ["input_layernorm.weight"], "feature_norm.weight": ["hidden_norm.weight"],
}
MIDLAYER = "midlayer."
EAGLE3 = EAGLE | {"norm.weight": ["norm.weight"]} | with_prefix(EAGLE3_LAYER, "layer.", MIDLAYER)
HEADS = {"eagle": EAGLE1, "eagle3": EAGLE3}
VOCABULARY_MAPS = "d2t", "token_map", "t2d"
# Keys of a head's config that `read_eagle` reads or need not read; a config with another is of a variant.
HEAD_KEYS = {key for key, _ in KEYS.values()} | {
    "architectures", "attention_dropout", "bias", "bos_token_id", "draft_vocab_size", "dtype",
    "eos_token_id", "hidden_act", "initializer_range", "model_type", "pad_token_id", "pretraining_tp",
    "torch_dtype", "transformers_version", "use_cache",
}


def layout_of(source: Source) -> str | None:
    """Return "target", "eagle" or "eagle3" if this file reads all that a source holds, else None."""
    known = {name: {s for parts in table.values() for s in parts} for name, table in HEADS.items()}
    names = source.tensors.keys() - {*VOCABULARY_MAPS}
    if "fc.weight" in names and source.config.keys() <= HEAD_KEYS and is_plain(source.config):
        return next((kind for kind, table in known.items() if names <= table), None)
    family = DENSE.get(source.architecture)
    numbered = {re.sub(r"^model\.layers\.\d+\.", "model.layers.{i}.", name) for name in names}
    return "target" if family and numbered <= {s for parts in family.names.values() for s in parts} else None


def read_eagle(source: Source, kind: str, target: ModelArgs) -> ReadHead:
    """Read a head as its authors publish it. kind: of `layout_of`. Raises InputError."""
    first, tensors = MIDLAYER if kind == "eagle3" else "layers.0.", dict(source.tensors)
    config = with_head_dim({k: v for k, v in source.config.items() if v is not None}, tensors, first)
    shape = dense_fields(source.path / CONFIG, config)
    return ReadHead(eagle_fields(kind, config, shape, tensors, target, first), HEADS[kind], tensors)


def with_head_dim(config: dict, tensors: dict[str, Entry], first: str) -> dict:
    """Return a head's config with head_dim from its q_proj: the file may have none, or a wrong one (Qwen)."""
    query, heads = tensors.get(f"{first}self_attn.q_proj.weight"), config.get("num_attention_heads")
    return config | ({"head_dim": query.shape[0] // heads} if query and heads else {})


def eagle_fields(
    kind: str, config: dict, shape: dict, tensors: dict[str, Entry], target: ModelArgs, first: str
) -> dict:
    """Return our config.json of an EAGLE head; the file decides about biases, norms and matrices of its own.

    config: the published one. shape: the fields of ModelArgs of the head's layers. first: the prefix of the
    first layer's tensors.
    """
    lm_head = tensors.get("lm_head.weight")
    fields = shape | layer_flags(tensors, first) | {
        "kind": kind, "tie_embeddings": bool(config.get("tie_word_embeddings")) and lm_head is None,
        "target_hidden_size": config.get("target_hidden_size") or target.hidden_size,
        "draft_window": config.get("draft_window") or 0,
    }
    if kind == "eagle":
        return fields | {
            "num_layers": 1, "draft_vocab_size": fields["vocab_size"], "aux_layers": [target.num_layers],
            "own_lm_head": lm_head is not None,
        }
    size = draft_vocab_size(config, tensors, fields["vocab_size"])
    return fields | {
        "draft_vocab_size": size, "own_lm_head": lm_head is not None or size != fields["vocab_size"],
        "aux_layers": list(eagle3_aux_layers(target.num_layers)), "feature_norm": "",
        "norm_before_residual": False, "recycle_normed": False,
    }


def layer_flags(tensors: dict[str, Entry], first: str = "layers.0.") -> dict:
    """Return the fields that follow from the names of tensors: configs omit them, or are wrong.

    first: the prefix of the first layer.
    """
    return {
        "fc_bias": "fc.bias" in tensors, "qkv_bias": f"{first}self_attn.q_proj.bias" in tensors,
        "qk_norm": f"{first}self_attn.q_norm.weight" in tensors,
    }


def draft_vocab_size(config: dict, tensors: dict[str, Entry], vocab_size: int) -> int:
    """Return the size of the draft vocabulary: the config's, the lm_head's, or the target's."""
    lm_head = tensors.get("lm_head.weight")
    return config.get("draft_vocab_size") or (lm_head.shape[0] if lm_head else vocab_size)


def eagle3_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs feed an EAGLE-3 head unless its config says otherwise.

    Layers 2, L//2 and L-3 (SafeAILab/EAGLE, modeling_llama_kv.py); SpecForge writes the same states as
    "outputs of layers 1, L//2-1, L-4".
    """
    return 2, num_layers // 2, num_layers - 3
