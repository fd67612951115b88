"""Qwen3-Next, Qwen3.5 and later in files of others: their configs, and the tensors that ours are made of.

Sources: transformers' modelling files, llama.cpp's conversion/qwen.py.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.source import Entry
from common.errors import InputError, printable

# Keys of a config that are read elsewhere or do not change the numbers of text.
HARMLESS = frozenset((
    "_name_or_path", "architectures", "attention_bias", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "decoder_sparse_step", "dtype", "eos_token_id", "head_dim", "head_dtype",
    "hidden_act", "hidden_size", "id2label", "image_token_id", "initializer_range", "intermediate_size",
    "is_encoder_decoder", "label2id", "language_model_only", "mamba_ssm_dtype",
    "max_position_embeddings", "max_window_layers", "mlp_only_layers", "model_type",
    "moe_intermediate_size", "mtp_num_hidden_layers", "norm_topk_prob", "num_attention_heads",
    "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "problem_type", "quantization_config", "query_pre_attn_scalar", "return_dict",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "router_aux_loss_coef",
    "sliding_window", "sliding_window_pattern", "text_config", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "use_sliding_window", "video_token_id", "vision_config",
    "vision_end_token_id", "vision_start_token_id", "vocab_size",
))
DELTA = {  # keys -> fields of ModelArgs, and transformers' defaults
    "linear_num_value_heads": ("delta_heads", 32), "linear_num_key_heads": ("delta_key_heads", 16),
    "linear_key_head_dim": ("delta_key_dim", 128), "linear_value_head_dim": ("delta_value_dim", 128),
    "linear_conv_kernel_dim": ("delta_taps", 4), "shared_expert_intermediate_size": ("shared_expert_size", 0),
}
EXPECTED = {  # other keys, and the values that we compute
    "attn_output_gate": (True, None), "mtp_use_dedicated_embeddings": (False, None),
    "output_gate_type": ("swish", "silu", None),
}
READ = {*DELTA, *EXPECTED, "layer_types", "full_attention_interval", "partial_rotary_factor"}


def hybrid_fields(path: Path, config: dict) -> tuple[dict, dict]:
    """Return (the config without what is read here, fields of ModelArgs).

    Raises InputError on a key that we do not know, unless it is off, and on values that we would not compute.
    """
    for key, value in config.items():
        known = key in HARMLESS or key in READ
        if value in EXPECTED[key] if key in EXPECTED else known or value in (None, False, [], {}):
            continue
        shown = json.dumps(value)[:60]
        raise InputError(f"{path}: {printable(key)} {shown} is not supported for this model")
    fields = {field: config.get(key, usual) for key, (field, usual) in DELTA.items()}
    layers, kinds = config.get("num_hidden_layers") or 0, config.get("layer_types")
    if kinds is None:
        period = config.get("full_attention_interval", 4)
        kinds = ["full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(layers)]
    if {*kinds} != {"full_attention", "linear_attention"} or len(kinds) != layers:
        raise InputError(f"{path}: layer_types must be linear_attention or full_attention for each of"
                         f" {layers} layers, and both among them")
    fields["delta_layers"] = [int(kind == "linear_attention") for kind in kinds]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    share = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    for key in ("mrope_section", "mrope_interleaved"):  # of text all positions are the same
        rope.pop(key, None)
    if rope.get("rope_type", rope.get("type", "default")) == "yarn":
        raise InputError(f"{path}: yarn for heads of which a part turns is not supported")
    head_dim = config.get("head_dim") or 0
    fields["rotary_dim"] = int(head_dim * share) if share != 1 else 0
    rest = {k: v for k, v in config.items() if k not in READ and k != "rope_scaling"}
    return rest | {"rope_parameters": rope}, fields


def _rows(entry: Entry, order: Tensor) -> Entry:
    """Return a tensor with these of its rows, in this order."""
    return Entry.of((len(order), *entry.shape[1:]), entry.dtype, lambda: entry.read()[order])


def turning_first(head_dim: int, rotary: int) -> Tensor:
    """Return the order of a head's numbers that puts pairs that turn at (j, j + hd/2), from the first on.

    In files the first `rotary` numbers turn, pairs (j, j + rotary/2).
    """
    rest = torch.arange(rotary, head_dim).chunk(2)
    turning = torch.arange(rotary).chunk(2)
    return torch.cat((turning[0], rest[0], turning[1], rest[1]))


class Rearranged:
    """The tensors of a model under the names of Qwen3.5 with q and its gate apart, heads as `turning_first`.

    path: for errors. fields: of ModelArgs. tiled: heads of values lie in groups with one for every head of
    keys.
    """

    def __init__(self, path: Path, fields: dict, tiled: bool):
        self.path, self.tiled = path, tiled
        self.head_dim, self.rotary = fields["head_dim"], fields["rotary_dim"] or fields["head_dim"]
        self.keys, self.values = fields["delta_key_heads"], fields["delta_heads"]
        self.key_dim, self.value_dim = fields["delta_key_dim"], fields["delta_value_dim"]
        if not self.keys or self.values % self.keys:
            raise InputError(f"{path}: {self.values} heads of values are no multiple of {self.keys} of keys")

    def of(self, tensors: dict[str, Entry]) -> dict[str, Entry]:
        """Return the tensors. Raises InputError if one has a shape that cannot be taken apart."""
        found: dict[str, Entry] = {}
        for name, entry in tensors.items():
            for new, part in self._parts(name, entry).items():
                found[new] = part
        return found

    def _fit(self, name: str, entry: Entry, rows: int) -> None:
        if not entry.shape or entry.shape[0] != rows:
            found = list(entry.shape)
            raise InputError(f"{self.path}: tensor {printable(name)} {found}: expected {rows} rows")

    def _parts(self, name: str, entry: Entry) -> dict[str, Entry]:
        stem, _, last = name.rpartition("linear_attn.")
        if stem:
            return {f"{stem}linear_attn.{n}": e for n, e in self._delta(name, last, entry).items()}
        stem, _, last = name.rpartition("self_attn.")
        if stem and last in ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"):
            return {f"{stem}self_attn.{n}": e for n, e in self._attention(name, last, entry).items()}
        return {name: entry}

    def _attention(self, name: str, last: str, entry: Entry) -> dict[str, Entry]:
        order, size = turning_first(self.head_dim, self.rotary), self.head_dim
        unit = 2 * size if last == "q_proj.weight" else size
        self._fit(name, entry, (entry.shape[0] // unit if entry.shape else 0) * unit or unit)
        first = torch.arange(entry.shape[0] // unit)[:, None] * unit
        parts = {last: _rows(entry, (first + order).flatten())}
        if last == "q_proj.weight":
            parts["gate_proj.weight"] = _rows(entry, (first + size + torch.arange(size)).flatten())
        return parts

    def _untiled(self, size: int) -> Tensor:
        """Return the order that puts heads of values back beside the head of keys that they use."""
        each = self.values // self.keys
        place = torch.arange(self.values * size).view(each, self.keys, size)
        return place.transpose(0, 1).flatten()

    def _delta(self, name: str, last: str, entry: Entry) -> dict[str, Entry]:
        keys, values = self.keys * self.key_dim, self.values * self.value_dim
        each = self.values // self.keys
        if last == "in_proj_qkvz.weight":  # head of keys by head of keys
            sizes = self.key_dim, self.key_dim, each * self.value_dim, each * self.value_dim
            self._fit(name, entry, 2 * keys + 2 * values)
            place = torch.arange(2 * keys + 2 * values).view(self.keys, sum(sizes)).split(sizes, dim=1)
            q, k, v, z = (x.flatten() for x in place)
            parts = {"qkv": torch.cat((q, k, v)), "z": z}
            return {f"in_proj_{n}.weight": _rows(entry, order) for n, order in parts.items()}
        if last == "in_proj_ba.weight":
            self._fit(name, entry, 2 * self.values)
            b, a = torch.arange(2 * self.values).view(self.keys, 2 * each).chunk(2, dim=1)
            return {f"in_proj_{n}.weight": _rows(entry, x.flatten()) for n, x in (("b", b), ("a", a))}
        if last == "conv1d.weight" and len(entry.shape) == 3:
            entry = entry.changed(lambda x: x[:, 0], (entry.shape[0], entry.shape[2]))
        if self.tiled:
            order = self._untiled(1 if last in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")
                                  else self.value_dim)
            if last in ("in_proj_qkv.weight", "conv1d.weight"):
                order = torch.cat((torch.arange(2 * keys), 2 * keys + order))
            if last == "out_proj.weight":
                entry = entry.changed(lambda x: x[:, order])
            elif last != "norm.weight":
                self._fit(name, entry, len(order))
                entry = _rows(entry, order)
        return {last: entry}


def part_rows(args, name: str) -> tuple[int, ...] | None:
    """Return the rows of the sources of one of our tensors that are stacked here; None of other tensors."""
    if ".w_in." in name:
        values = args.delta_heads * args.delta_value_dim
        return args.delta_width, values, args.delta_heads, args.delta_heads
    width, keys = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    return (width, keys, keys, width) if ".wqkv." in f".{name}" and args.delta_layers else None
