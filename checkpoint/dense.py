"""Tensor names and config keys of published checkpoints, mapped to ours."""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from pathlib import Path

from checkpoint.load import CONFIG
from common.errors import InputError
from model import ModelArgs

# Our tensor -> its source tensors, concatenated along the output dimension in this order. {i} is the layer,
# {e} the expert; with {e}, the tensors of each expert in turn.
NameTable = dict[str, list[str]]
# names.json has the tables of all formats, without prefixes, and the defaults of config keys by family.
# A table extends the one that it is "like"; (a|b) stands for several source tensors.
DATA = json.loads(Path(__file__).with_name("names.json").read_text())
DEFAULTS = DATA["defaults"]


def name_table(*tables: str) -> NameTable:
    """Return the union of these tables of names.json; later ones win."""
    table: NameTable = {}
    for name in tables:
        own = dict(DATA["tables"][name])
        table |= name_table(own.pop("like")) if "like" in own else {}
        for ours, pattern in own.items():
            before, names, after = re.fullmatch(r"([^(]*)\(?([^)]*)\)?(.*)", pattern).groups()
            table[ours] = [before + name + after for name in names.split("|")]
    return table


LAYER = name_table("llama")  # source tensors of one layer; draft heads use the same names
# Fields of ModelArgs: Hugging Face's keys and their defaults (None: required, or derived from other keys).
# Read by `checkpoint.configs: model_fields`, written by `checkpoint.export: llama_config`.
KEYS = {
    "vocab_size": ("vocab_size", None), "hidden_size": ("hidden_size", None),
    "intermediate_size": ("intermediate_size", None), "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None), "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None), "norm_eps": ("rms_norm_eps", 1e-6), "rope_base": ("rope_theta", 10000.0),
    "rope_scaling": ("rope_scaling", None), "max_seq_len": ("max_position_embeddings", 2048),
    "tie_embeddings": ("tie_word_embeddings", False),
}
NEEDED = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"
# Patterns of keys that are ignored if no code reads them: training, generation, metadata, vision, audio; keys
# that follow from others, or from the tensors of a head.
HARMLESS = re.compile("|".join(Path(__file__).with_name("harmless_keys.txt").read_text().split()))

TRUE_BY_DEFAULT = "is_causal", "rope_is_neox_style", "is_neox_style"  # false changes the computation


class RecordedConfig(dict):
    """A config that records which of its keys are read, also through `config | changes` and `rope_of`."""

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

    Includes RoPE parameters. Keys of `TRUE_BY_DEFAULT` are rejected if they are false instead.
    known: keys that may stay unread: the family renames them or has a default.
    """
    no_effect, known = (None, False, 0, 1, "", [], {}), config.read | {*known}
    rope, text = rope_of(config), config.get("text_config") or config  # not those of vision and audio
    rope_by_layer_type = [one for one in rope.values() if isinstance(one, dict)]
    parts = {k: v for k, v in config.items() if k in text}, rope, *rope_by_layer_type
    unread = {
        key: value for part in parts for key, value in part.items()
        if key not in known and not HARMLESS.fullmatch(key)
        and (value is True or value not in no_effect) != (key in TRUE_BY_DEFAULT)}
    if unread:
        listed = ", ".join(f"{key} {json.dumps(value)[:60]}" for key, value in unread.items())
        advice = f"; if not, delete it from {CONFIG}" * (path.suffix != ".gguf")
        raise InputError(f"{path}: {listed} is not supported: an unknown key, which may change the"
                         f" computation{advice}")


def with_prefix(table: NameTable, prefix: str, source_prefix: str) -> NameTable:
    """Return a table whose tensors have these prefixes, on our side and in the source."""
    return {prefix + name: [source_prefix + s for s in sources] for name, sources in table.items()}


def hugging_face(layer: NameTable) -> NameTable:
    """Return the table of a Hugging Face model whose layers have these tensors."""
    layer = {"attn_norm.weight": ["input_layernorm.weight"]} | layer
    return {
        "embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"], **with_prefix(layer, "layers.{i}.", "model.layers.{i}."),
    }


def qkv_rows(a: ModelArgs) -> tuple[int, ...]:
    """Return the numbers of rows of q, k, v and the output gate; `parts_of` drops missing ones."""
    width, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return width, kv, kv, width


STACKS = {"wqkv.": qkv_rows}  # fused tensors with parts of different sizes; others are split evenly


def parts_of(
    names: NameTable, args: ModelArgs, name: str, shape: tuple[int, ...], stacks: dict = STACKS
) -> dict[str, tuple[int, ...]]:
    """Return the source tensors of one of our tensors with their shapes, in order of concatenation.

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
        layer_args = args.of_layer(int(layer[0]) if layer else 0) if hasattr(args, "of_layer") else args
        rows = stacks[stack](layer_args)
        rows = tuple(n for n, end in zip(rows, accumulate(rows)) if end <= shape[0])  # may lack v
    return {source: (count, *shape[1:]) for source, count in zip(sources, rows * len(experts))}


def rope_of(config: dict) -> dict:
    """Return the parameters of a config's RoPE, of transformers 5 or 4.

    If both keys are set, rope_scaling wins, as in transformers 5: it was probably added to extend the
    context. Its base is that of rope_parameters, where transformers 5.23 falls back to 10,000.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    recorded = partial(RecordedConfig, read=getattr(config, "read", None))
    if full := parameters.get("full_attention"):
        full = rope_of(recorded({"rope_parameters": full, "rope_scaling": scaling}))
        by_layer_type = parameters | {"full_attention": full}
        return recorded({k: recorded(v) if isinstance(v, dict) else v for k, v in by_layer_type.items()})
    base = {key: parameters.get(key, config.get(key)) for key in ("rope_theta", "partial_rotary_factor")}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    base = {key: value for key, value in base.items() if value is not None}
    return recorded(base | scaling if scaling else parameters)


def rope_type(rope: dict) -> str:
    """Return the scaling type of RoPE parameters."""
    return rope.get("rope_type", rope.get("type", "default"))
