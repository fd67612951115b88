"""GGUF files as a `Source`. The keys of their metadata are those of llama.cpp's gguf/constants.py.

Which tensors a family has is in `checkpoint.families`; here are the container and its config.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from checkpoint import hybrid
from checkpoint.folder import Factor, Length
from checkpoint.hybrid import GGUF_HYBRIDS
from checkpoint.source import Entry, Source, unique_ids
from common.cli import library_errors
from common.errors import InputError, printable
from common.files import check_file
from common.schema import Flag, Ids, Layers, Many, Name, Schema, Text, Whole, Width, number, text, whole
from tokens.gguf_tokenizer import rebuild

BLOCK_BYTES = 64 << 20  # of float32, per dequantised block
Token, Short = whole(0, 2**32 - 1), text(64)
TOKENIZER = {
    "model": Short, "pre": Short, "tokens": list[text(2**16)], "merges": list[Text], "scores": list[number()],
    "token_type": list[whole(0, 2**16)], "add_bos_token": Flag, "add_space_prefix": Flag,
    **{f"{name}_token_id": Token for name in ("bos", "eos", "eot", "eom", "unknown", "padding")},
}
# Tensors of one number for each frequency (rope_NAME.weight): our key of llama3 scaling, or longrope's.
DIVISORS = {"freqs": "divisors", "factors_short": "short_factor", "factors_long": "long_factor"}
OWN = {  # of the architecture, under its name and a dot
    "embedding_length": Width, "attention.head_count": Many, "attention.head_count_kv": Many,
    "rope.dimension_count": Many, "attention.key_length": Many, "attention.value_length": Many,
    "attention.layer_norm_rms_epsilon": number(above=0, high=1), "vocab_size": Ids,
    "feed_forward_length": Width, "expert_feed_forward_length": Width, "expert_count": whole(0, 10_000),
    "expert_used_count": whole(0, 10_000), "block_count": Layers, "context_length": whole(1),
    "rope.freq_base": number(above=1, high=1e15), "rope.freq_base_swa": number(above=1, high=1e15),
    "attention.sliding_window": Whole, "attention.sliding_window_pattern": whole(1),
    "rope.scaling.type": Short, "nextn_predict_layers": Whole, "full_attention_interval": whole(1),
    "expert_shared_feed_forward_length": Width,
    **dict.fromkeys(("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"), Many),
    "ssm.inner_size": Width,
    **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), number(0, 1e6)),  # 0: none
    "rope.scaling.original_context_length": Length, "rope.scaling.yarn_beta_fast": Factor,
    "rope.scaling.yarn_beta_slow": Factor, "rope.scaling.attn_factor": Factor,
    "rope.scaling.yarn_attn_factor": Factor,
}


def metadata(arch: str) -> Schema:
    """Return what the metadata of a file of this architecture may hold."""
    keys = {"general.architecture": Name, "split.count": Whole}
    keys |= dict.fromkeys(("tokenizer.chat_template", "tokenizer.chat_template.tool_use"), Text)
    keys |= {f"tokenizer.ggml.{name}": kind for name, kind in TOKENIZER.items()}
    keys |= {f"{arch}.{name}": kind for name, kind in OWN.items()}
    return Schema(TypedDict("Metadata", {key: NotRequired[kind] for key, kind in keys.items()}))


def open_gguf(path: Path) -> Source:
    """Open a GGUF file. Raises InputError if it is damaged, or describes a model that we cannot run."""
    fields, stored = _read(path)
    arch = str(fields.get("general.architecture"))
    for key, value in fields.items():
        if key.startswith(f"{arch}.") and isinstance(value, list) and key.removeprefix(f"{arch}.") in OWN:
            raise InputError(f"{path}: {key} differs from layer to layer, which is not supported")
    metadata(arch).require(fields, path)
    if fields.get("split.count", 1) > 1:
        raise InputError(f"{path}: is one part of a split GGUF; merge the parts with llama-gguf-split first")
    divisors = {key: stored.pop(f"rope_{name}.weight") for name, key in DIVISORS.items()
                if f"rope_{name}.weight" in stored}
    config = _config(path, arch, fields, stored, divisors)
    # llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of every q and k head.
    # Only the size of a head matters for undoing it, not the number of heads.
    interleaved = re.compile(r"blk\.\d+\.attn_[qk]\.weight") if arch == "llama" else re.compile("$^")
    tensors, stacks = {}, [tensor for tensor in stored.values() if len(tensor.shape) == 3]
    kept = {tensor.tensor_type.name for tensor in stacks} == {"MXFP4"}  # at 4 bits
    for name, tensor in stored.items():
        if "_exps." in name or len(tensor.shape) == 3:  # a matrix, or a bias, for each expert
            if tensor.shape[-1] != config["num_experts"]:
                raise InputError(
                    f"{path}: tensor {printable(name)} has {tensor.shape[-1]:,} matrices; expected"
                    f" {config['num_experts']:,}, {arch}.expert_count"
                )
            for e in range(int(tensor.shape[-1])):
                if kept and len(tensor.shape) == 3:
                    values, exponents = _mxfp4(tensor, e)
                    tensors |= {f"{name}[{e}]": values, f"{name.removesuffix('weight')}scale[{e}]": exponents}
                else:
                    tensors[f"{name}[{e}]"] = _entry(path, tensor, expert=e)
        else:
            entry = _entry(path, tensor, config.get("head_dim") if interleaved.fullmatch(name) else None)
            # llama.cpp's converter adds the 1 that zero-centred norms multiply by.
            tensors[name] = _less_one(entry) if arch == "gemma3" and name.endswith("norm.weight") else entry

    if arch in GGUF_HYBRIDS:
        tensors = hybrid.from_gguf(tensors, config.get("num_hidden_layers", 0))
    stop_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    family = f"gguf:{arch}" + ("+experts" if config["num_experts"] else "")
    return Source(
        path, family, config, tensors, unique_ids(*stop_ids), fields.get("tokenizer.ggml.bos_token_id"),
        tokenizer=partial(rebuild, fields, where=str(path)),
    )


def _read(path: Path) -> tuple[dict, dict]:
    """Return the metadata by key, and the tensors by name, read by the package gguf. Raises InputError."""
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError:
        raise InputError(f"{path}: reading a GGUF needs the package gguf (pip install gguf)") from None
    check_file(path)
    # The reader maps the file, and takes no memory for a length that a damaged one pretends.
    with library_errors(f"{path}: truncated or damaged"):
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in {t.tensor_type: t for t in tensors.values()}.values():
        try:
            block = np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]), np.uint8)
            dequantize(block, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise InputError(
                f"{path}: tensor {printable(tensor.name)} is of type {kind}, which cannot be dequantised"
            ) from None
    return fields, tensors


def _config(path: Path, arch: str, fields: dict, tensors: dict, divisors: dict) -> dict:
    """The metadata under Hugging Face's keys. Sizes that a writer may leave out are read off the tensors."""

    def get(key: str, default=None):
        return fields.get(f"{arch}.{key}", default)

    hidden, heads, rotary = get("embedding_length"), get("attention.head_count"), get("rope.dimension_count")
    head_dim = get("attention.key_length") or rotary or (hidden // heads if hidden and heads else None)
    turning = head_dim if arch in GGUF_HYBRIDS else rotary or head_dim
    if turning != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{path}: heads whose keys, values and rotary part differ in size are not supported")
    embed, blocks = tensors.get("token_embd.weight"), get("block_count")
    eps = get("attention.layer_norm_rms_epsilon")
    # As llama.cpp: of Gemma 3, only the model of 27B has scores over another root than that of head_dim.
    scalar = hidden // heads if arch == "gemma3" and get("block_count") == 62 and hidden and heads else None
    config = {
        "vocab_size": int(embed.shape[-1]) if embed is not None else get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("expert_feed_forward_length") or get("feed_forward_length"),
        "num_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "num_hidden_layers": blocks and blocks - get("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": None if eps is None else _shortest_decimal(eps),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(path, arch, get, divisors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": get("context_length"),
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": get("attention.sliding_window_pattern"),
        "rope_local_base_freq": get("rope.freq_base_swa"),
        "query_pre_attn_scalar": scalar or (head_dim if arch == "gemma3" else None),
    }
    if arch in GGUF_HYBRIDS:
        config |= hybrid.gguf_config(get, rotary, head_dim)
    # No key at all: then a family may have a default.
    return {key: value for key, value in config.items() if value is not None}


def _shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _rope_scaling(path: Path, arch: str, get: Callable, divisors: dict) -> dict | None:
    # As llama.cpp: a factor without a type is a linear one, and files of 2023 have an older key.
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    kind = get("rope.scaling.type") or "linear"
    if kind == "linear" and factor in (None, 1):
        kind = "none"
    if kind not in ("none", "linear", "yarn") or (kind != "none" and divisors):
        raise InputError(f"{path}: rope scaling of type {kind!r} is not supported")
    if divisors:  # llama3 scaling is stored as one divisor per frequency, longrope as two
        numbers = {key: _numbers(one.data, one).flatten().tolist() for key, one in divisors.items()}
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
    # llama.cpp multiplies the usual factor of yarn by these, and writes one of them.
    extra = get("rope.scaling.attn_factor") or get("rope.scaling.yarn_attn_factor")
    if kind == "yarn" and extra and factor:
        values["attention_factor"] = extra * (0.1 * math.log(factor) + 1)
    if arch == "gpt-oss":  # a key of its config that a GGUF has not
        values["truncate"] = False
    return {"rope_type": kind, "factor": factor, **values}


def _less_one(entry: Entry) -> Entry:
    """Return a tensor less one."""
    return Entry.of(entry.shape, entry.dtype, lambda: entry.read() - 1)


def _numbers(data, tensor) -> Tensor:
    """Return rows of a tensor's data as numbers."""
    from gguf.quants import dequantize

    return torch.tensor(dequantize(data, tensor.tensor_type))


def _mxfp4(tensor, expert: int) -> tuple[Entry, Entry]:
    """Return the values [N, K/2] and exponents [N, K/32] of one matrix in MXFP4, both in bytes.

    A block of 32 is its exponent and 16 bytes, which hold the first 16 values in their low bits.
    """
    inputs, outputs = map(int, tensor.shape[:2])

    def blocks() -> Tensor:
        return torch.tensor(tensor.data[expert]).view(outputs, inputs // 32, 17)

    def values() -> Tensor:
        packed = blocks()[..., 1:]
        low, high = torch.cat((packed & 15, packed >> 4), -1).unflatten(-1, (-1, 2)).unbind(-1)
        return (low | high << 4).flatten(1)

    return (
        Entry.of((outputs, inputs // 2), torch.uint8, values),
        Entry.of((outputs, inputs // 32), torch.uint8, lambda: blocks()[..., 0]),
    )


def _entry(path: Path, tensor, interleaved: int | None = None, expert: int | None = None) -> Entry:
    """One tensor, or one matrix (or bias) of a stack.

    interleaved: the head size, if the rows of each head are interleaved and have to be put back in halves.
    expert: which matrix of a stack.
    """
    shape = tuple(map(int, tensor.shape[::-1]))
    data = tensor.data
    if expert is not None:
        shape, data = shape[1:], data[expert]
    # Quantised types become bf16, which is precise enough for all of them.
    dtypes = {"F32": torch.float32, "F16": torch.float16}
    unit = interleaved or 1
    if shape[0] % unit:
        raise InputError(
            f"{path}: tensor {printable(tensor.name)} {list(shape)} is not a multiple of heads of {unit} rows"
        )
    rows = max(BLOCK_BYTES // (4 * math.prod(shape[1:])) // unit, 1) * unit

    def blocks() -> Iterator[Tensor]:
        for start in range(0, shape[0] if len(shape) > 1 else 1, rows):
            block = _numbers(data[start : start + rows] if len(shape) > 1 else data, tensor)
            if interleaved:  # [heads, hd/2, 2, in] -> [heads, 2, hd/2, in]
                block = block.unflatten(0, (-1, interleaved // 2, 2)).transpose(1, 2).flatten(0, 2)
            yield block

    return Entry(shape, dtypes.get(tensor.tensor_type.name, torch.bfloat16), blocks)
