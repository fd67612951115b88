"""GGUF files as a `Source` with Hugging Face's config keys and tensor names.

Metadata keys and tensor names follow llama.cpp's gguf/constants.py; tensor transformations invert its
converter's.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from checkpoint import gemma4, latent
from checkpoint.dense import RecordedConfig, reject_unread
from checkpoint.families import Family, family_of
from checkpoint.gguf_file import GGUFTensor, read_gguf
from checkpoint.gguf_types import TYPES, read_stored
from checkpoint.source import Entry, Grouped, Source, unique_ids
from common.errors import InputError
from kernels.stored import pack_values, regroup
from tokens.gguf_tokenizer import rebuild

UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
BLOCK = 1 << 19  # bytes of rows that are read at a time: they stay in a cache, and malloc keeps their memory
# Names in llama.cpp -> names in Hugging Face.
# keys: metadata keys without the prefix ARCH.; if two map to one, the later wins. divisors: tensors
# rope_NAME.weight with a factor per frequency -> key of llama3 scaling or longrope. tensors: missing in
# gguf's name table: Gemma 4, GLM, MTP layers. fused: fused tensors, split when read. leaves: added suffixes.
# interleaved: architectures with interleaved rotary pairs. "not models": by general.type.
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
KINDS = "full_attention", "sliding_attention"  # of layers without and with a window
DELTA_KINDS = "full_attention", "linear_attention"
SELECTOR = "selector_hidden.weight"  # of DFlash2


class HeadFormat(NamedTuple):
    """A draft head: the family of its layers, further names of tensors and metadata keys, and fixed keys.

    Target layers are numbered by their inputs.
    """

    family: str
    names: dict[str, str]
    keys: dict[str, str]
    fixed: dict


HEADS = {arch: HeadFormat(**head) for arch, head in TABLES["heads"].items()}


def open_file(path: Path) -> Source:
    """Open a GGUF file. Raises InputError if it is damaged, or describes a model that we cannot run."""
    fields, stored = _all_parts(path)
    arch = str(fields.get("general.architecture"))
    if other := _other_content(fields, stored):
        raise InputError(f"{path}: is {other}, not a model; name the GGUF file of the model")
    mixture = "+experts" if fields.get(f"{arch}.expert_count") else ""
    family = f"gguf:{HEADS[arch].family if arch in HEADS else arch}{mixture}"
    known = family_of(path, family)
    divisors = {key: stored.pop(f"rope_{name}.weight") for name, key in TABLES["divisors"].items()
                if f"rope_{name}.weight" in stored}
    config = _config(path, arch, known, fields, stored, divisors)
    if head := HEADS.get(arch):
        vocabulary = config.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ()))
        config |= head.fixed | {
            "vocab_size": vocabulary, "mask_token_id": fields.get("tokenizer.ggml.mask_token_id")}
    if SELECTOR in stored:
        config["architectures"] = ["DFlash2DraftModel"]
    names, layers, tensors = _names(arch, known), config.get("num_hidden_layers", 0), {}
    kept = {tensor.type.name for tensor in stored.values() if len(tensor.shape) == 3} == {"MXFP4"}
    for theirs, tensor in stored.items():
        name = _name(theirs, names, layers)
        stack = len(tensor.shape) > 2 and not theirs.endswith("_conv_base")
        if not stack and not theirs.endswith("_exps.bias"):
            # llama.cpp rotates neighboring pairs in these families: its converter interleaves the halves of
            # every q and k head. Only the size of a head matters for undoing it, not the number of heads.
            interleaved = arch in TABLES["interleaved"] and re.search(r"\.attn_[qk]\.weight$", theirs)
            entry = _entry(tensor, config.get("head_dim") if interleaved else None)
            tensors[name] = _as_published(name, known, entry)
            continue
        for e in range(tensor.shape[0]):  # a matrix, or a bias, for each expert
            own = name.replace("{e}", str(e)) if "{e}" in name else f"{name}[{e}]"
            if kept and len(tensor.shape) == 3:  # at 4 bits
                tensors[own], tensors[f"{own.removesuffix('weight')}scale"] = _mxfp4(tensor, e)
            elif "gate_up_exps" in theirs:
                half = tensor.shape[1] // 2
                for part, rows in ("gate", slice(half)), ("up", slice(half, None)):
                    tensors[own.replace("gate_up", part)] = _entry(tensor, expert=e, rows=rows)
            else:
                tensors[own] = _entry(tensor, expert=e)
    stop_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Source(
        path, family, config, tensors, unique_ids(*stop_ids), fields.get("tokenizer.ggml.bos_token_id"),
        tokenizer=partial(rebuild, fields, where=str(path)))


def kind_of_file(path: Path) -> str:
    """Describe the content of a GGUF file. Raises InputError if it is damaged."""
    fields, stored = read_gguf(path)
    part = f", part {fields['split.no'] + 1} of {fields['split.count']}" if "split.no" in fields else ""
    arch = fields.get("general.architecture")
    content = f"a draft head ({arch})" if arch in HEADS else f"a model ({arch})"
    return (_other_content(fields, stored) or content) + part


def _other_content(fields: dict, stored: dict) -> str | None:
    """Describe a file that is neither a model nor a head; None if it is one."""
    kind = fields.get("general.type") or ("adapter" if "adapter.type" in fields else "model")
    if kind == "model":
        return None if stored or "split.no" in fields else TABLES["not models"]["vocab"]
    return TABLES["not models"].get(kind, f"of the type {kind!r}")


def _all_parts(path: Path) -> tuple[dict, dict[str, GGUFTensor]]:
    """Read a GGUF file; if it is split, all parts. Only the first part has the model's metadata."""
    fields, stored = read_gguf(path)
    if (count := fields.get("split.count", 1)) < 2:
        return fields, stored
    named = re.fullmatch(r"(.+-)\d{5}(-of-\d{5}\.gguf)", path.name)
    if not named:
        raise InputError(f"{path}: is one of {count} parts of a split GGUF; name it as llama-gguf-split does,"
                         " NAME-00001-of-00002.gguf")
    parts = [read_gguf(path.with_name(f"{named[1]}{i:05}{named[2]}")) for i in range(1, count + 1)]
    stored = {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
    held = sum(len(tensors) for _, tensors in parts)
    expected = parts[0][0].get("split.tensors.count", len(stored))
    marked = [(one.get("split.no"), one.get("split.count")) for one, _ in parts]
    if marked != [(i, count) for i in range(count)] or not len(stored) == held == expected:
        raise InputError(f"{path}: its parts are not those of one file: {held} tensors, expected {expected};"
                         " download all again")
    return parts[0][0], stored


def _names(arch: str, family: Family) -> dict[str, str]:
    """Return llama.cpp's names of a family's tensors, with layer 0: theirs -> ours, with {i} and {e}."""
    if head := HEADS.get(arch):
        return _names(head.family, family) | head.names
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known, found = gguf.get_tensor_name_map(kind, 1), {}
    for ours in chain(TABLES["fused"], *family.names.values()):
        asked = ours.format(i=0, e="*").replace(".*", "").replace("dt_bias", "dt_proj.bias")
        asked += TABLES["leaves"].get(asked.rpartition(".")[2], "")
        for name in asked, asked.removeprefix("model."):
            if theirs := known.get_name(name, try_suffixes=(".weight", ".bias")):
                found[theirs] = ours
    return TABLES["tensors"] | found


def _name(theirs: str, names: dict[str, str], layers: int) -> str:
    """Return our name of a tensor, with {e} for the expert; theirs if there is none."""
    block = re.match(r"blk\.(\d+)\.", theirs)
    ours = names.get(re.sub(r"^blk\.\d+\.", "blk.0.", theirs), theirs)
    if block and int(block[1]) >= layers:  # of a hybrid: its MTP layers
        return ours.replace("model.layers.{i}.", f"mtp.layers.{int(block[1]) - layers}.")
    return ours.replace("{i}", block[1]) if block else ours


def _as_published(name: str, family: Family, entry: Entry) -> Entry:
    """Undo what llama.cpp's converter did to a tensor. name: ours."""
    norm = re.search(r"norm(_embedding|_hidden)?\.weight$", name)
    if norm and family.fixed.get("zero_centred") and "linear_attn." not in name:
        return entry.changed(lambda x: x - 1)
    if name.endswith("linear_attn.A_log"):
        return entry.changed(lambda x: (-x).log())
    if name.endswith("shared_expert_gate.weight") and len(entry.shape) == 1:
        return entry.changed(lambda x: x[None], (1, *entry.shape))
    return entry


def _config(
    path: Path, arch: str, family: Family, fields: dict, tensors: dict, divisors: dict
) -> dict:
    """Convert metadata to Hugging Face's keys. Missing sizes are derived from the tensors."""

    prefix = f"{arch}."
    said = RecordedConfig({k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)})
    get, same = said.get, TABLES["keys"] | (HEADS[arch].keys if arch in HEADS else {})
    if arch == "deepseek2":  # MLA: the metadata describe its compressed cache
        said.update({n: get(f"{n}_mla") for n in ("attention.key_length", "attention.value_length")})
    config = {ours: get(key) for key, ours in same.items() if get(key) is not None}
    config |= {key: _shortest_decimal(value) for key, value in config.items() if isinstance(value, float)}
    hidden, heads, blocks = map(config.get, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    rotary, inner = get("rope.dimension_count"), get("ssm.inner_size")
    partial, usual = "partial_rotary_factor" in family.defaults, hidden // heads if hidden and heads else None
    head_dim = config.get("head_dim") or (usual if partial else rotary or usual)
    if (not partial and (rotary or head_dim) != head_dim) or (
            get("attention.value_length", head_dim) != head_dim):
        raise InputError(f"{path}: heads whose keys, values and rotary part differ in size are not supported")
    values = config.get("linear_num_value_heads")
    embed, period = tensors.get("token_embd.weight"), config.get("sliding_window_pattern")
    recurrent, mtp = get("attention.recurrent_layers"), get("nextn_predict_layers", 0)
    layers, kinds = (period, KINDS) if isinstance(period, list) else (recurrent, recurrent and DELTA_KINDS)
    scalar = head_dim if arch == "gemma3" else None
    if arch == "gemma3" and blocks == 62 and hidden and heads:
        scalar = hidden // heads  # 27B: its attention scale differs, as in llama.cpp
    config |= {
        "vocab_size": config.get("vocab_size") if embed is None else embed.shape[0],
        "num_hidden_layers": blocks and blocks - mtp,
        "num_key_value_heads": config.get("num_key_value_heads", heads), "head_dim": head_dim,
        "rope_scaling": _rope_scaling(path, arch, get, divisors),
        "tie_word_embeddings": "output.weight" not in tensors, "query_pre_attn_scalar": scalar,
        "norm_topk_prob": get("expert_weights_norm", True) if config.get("num_experts") else None,
        "linear_value_head_dim": inner // values if inner and values else None,
        "layer_types": kinds and [kinds[one] for one in layers[: blocks - mtp]],
        **_conv_layers(config),
        "partial_rotary_factor": rotary / head_dim if partial and rotary and head_dim else None,
    }
    if arch == "mistral3":
        get("rope.scaling.yarn_log_multiplier")  # cancels, see `_rope_scaling`
    if arch == "gemma4":
        config |= gemma4.from_gguf(path, config, get, tensors, divisors)
    if arch == "deepseek2":
        config |= latent.from_gguf(config, rotary)
    reject_unread(path, said, TABLES["ignored"])
    # Drop missing keys, for which a family may have a default.
    return {key: value for key, value in config.items() if value is not None}


def _conv_layers(config: dict) -> dict:
    """Convert a list of KV head counts by layer (LFM2) to `layer_types` and one count."""
    if not isinstance(heads := config.get("num_key_value_heads"), list) or all(heads):
        return {}
    kinds = ["full_attention" if count else "conv" for count in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(heads), "block_auto_adjust_ff_dim": False}


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _rope_scaling(path: Path, arch: str, get: Callable, divisors: dict) -> dict | None:
    # As in llama.cpp: a factor without a type means linear; files of 2023 have an older key.
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    kind = get("rope.scaling.type") or "linear"
    if kind == "linear" and factor in (None, 1):
        kind = "none"
    if kind not in ("none", "linear", "yarn") or (kind != "none" and divisors):
        raise InputError(f"{path}: rope scaling of type {kind!r} is not supported")
    if divisors:  # llama3 scaling is stored as one divisor per frequency, longrope as two
        numbers = {key: one.numbers().flatten().tolist() for key, one in divisors.items()}
        if "divisors" in numbers:
            return {"rope_type": "divisors", **numbers}
        return {
            "rope_type": "longrope", **numbers, "attention_factor": get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
    if kind == "none":
        return None
    keys = {"original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    values = {name: get(f"rope.scaling.{key}") for name, key in keys.items()}
    # llama.cpp multiplies the default YaRN factor by these, and stores one of them; for OLMo 3 the product.
    extra = get("rope.scaling.attn_factor") or get("rope.scaling.yarn_attn_factor")
    if kind == "yarn" and extra and factor:
        values["attention_factor"] = extra * (1 if arch == "olmo2" else 0.1 * math.log(factor) + 1)
    if arch == "mistral3":  # its two factors of YaRN cancel
        values |= {"attention_factor": 1.0, "llama_4_scaling_beta": get("attention.temperature_scale")}
    if arch == "gpt-oss":  # a config key that GGUF lacks
        values["truncate"] = False
    return {"rope_type": kind, "factor": factor, **values}


def _mxfp4(tensor: GGUFTensor, expert: int) -> tuple[Entry, Entry]:
    """Return the values [N, K/2] and exponents [N, K/32] of one matrix in MXFP4, both in bytes.

    A block of 32 is the exponent and 16 bytes; the low bits are the first 16 values.
    """
    _, outputs, inputs = tensor.shape

    def blocks() -> Tensor:
        return torch.tensor(tensor.data[expert]).view(outputs, inputs // 32, 17)

    def values() -> Tensor:
        packed = blocks()[..., 1:]
        low, high = torch.cat((packed & 15, packed >> 4), -1).unflatten(-1, (-1, 2)).unbind(-1)
        return (low | high << 4).flatten(1)

    return (
        Entry((outputs, inputs // 2), torch.uint8, values),
        Entry((outputs, inputs // 32), torch.uint8, lambda: blocks()[..., 0]))


def _entry(
    tensor: GGUFTensor, interleaved: int | None = None, expert: int | None = None, rows: slice = slice(None)
) -> Entry:
    """Return the entry of a tensor, or of one expert of a stack.

    Quantized types are read as stored, as bf16, or in float32 (with a dtype of bf16) if no kind represents
    them. interleaved: head size, if the two halves of each head are interleaved. expert: index into a stack,
    with `rows` each.
    """
    if expert is not None:
        count = len(range(*rows.indices(tensor.shape[1])))
        tensor = GGUFTensor(tensor.type, (count, *tensor.shape[2:]), tensor.data[expert][rows])
    dtype = UNQUANTIZED.get(tensor.type.name, torch.bfloat16)
    shape, unit = tensor.shape, interleaved or 1

    def in_halves(block: Tensor) -> Tensor:  # [heads, hd/2, 2, in] -> [heads, 2, hd/2, in]
        if not interleaved:
            return block
        return block.unflatten(0, (-1, interleaved // 2, 2)).transpose(1, 2).flatten(0, 2)

    def by_blocks(read: Callable[[slice], tuple], itemsize: int) -> tuple:
        """Read tensors some rows at a time. itemsize: of the largest."""
        if len(shape) == 1:
            return read(slice(None))
        step = max(BLOCK // itemsize // math.prod(shape[1:]) // unit, 1) * unit
        result: tuple = ()
        for start in range(0, shape[0], step):
            blocks = read(rows := slice(start, start + step))
            result = result or tuple(x if x is None else x.new_empty(shape[0], *x.shape[1:]) for x in blocks)
            for whole, block in zip(result, blocks):
                if block is not None:
                    whole[rows] = in_halves(block)
        return result

    def stored(to, rows: slice) -> tuple:
        q, *scales = read_stored(tensor.type, tensor.data[rows])
        return pack_values(to, q), *regroup(known.kind, to, *scales)

    known = TYPES.get(tensor.type.name) if len(shape) == 2 else None
    read_as = dtype if known or tensor.type.name in UNQUANTIZED else torch.float32  # rounded once, later
    return Entry(
        shape, dtype, lambda: by_blocks(lambda rows: (tensor.numbers(rows).to(read_as),), 4)[0],
        "" if tensor.type.name in UNQUANTIZED else tensor.type.name,
        known and Grouped(known.kind, lambda to: by_blocks(partial(stored, to), 1)))
