"""GGUF files as a `Source`. The keys of their metadata are those of llama.cpp's gguf/constants.py."""
from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.source import END_TOKENS, Entry, Source, unique_ids
from common.errors import InputError, first_line

BLOCK_BYTES = 64 << 20  # of float32, per dequantised block
CONTROL = 3  # the type of a control token


def open_gguf(path: Path) -> Source:
    """Open a GGUF file. Raises InputError if it is damaged, or describes a model that we cannot run."""
    reader, fields = _read(path)
    arch = fields.get("general.architecture")
    if fields.get("split.count", 1) > 1:
        raise InputError(f"{path}: is one part of a split GGUF; merge the parts with llama-gguf-split first")
    stored = {t.name: t for t in reader.tensors}
    divisors = stored.pop("rope_freqs.weight", None)
    config = _config(path, arch, fields, stored, divisors)
    # llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of every q and k head.
    # Only the size of a head matters for undoing it, not the number of heads.
    interleaved = re.compile(r"blk\.\d+\.attn_[qk]\.weight") if arch == "llama" else re.compile("$^")
    tensors = {}
    for name, tensor in stored.items():
        if len(tensor.shape) == 3:  # one matrix for each expert
            experts = range(int(tensor.shape[2]))
            tensors |= {f"{name}[{e}]": _entry(path, tensor, expert=e) for e in experts}
        else:
            tensors[name] = _entry(path, tensor, config["head_dim"] if interleaved.fullmatch(name) else None)

    stop_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = fields.get("tokenizer.ggml.tokens") or [], fields.get("tokenizer.ggml.token_type") or []
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL}

    def tokenizer(folder: Path) -> bool:
        if not tokens:
            return False
        from tokens.gguf_tokenizer import from_gguf

        from_gguf(fields, folder)
        return True

    family = f"gguf:{arch}" + ("+experts" if config["num_experts"] else "")
    return Source(
        path, family, config, tensors,
        stop_ids=unique_ids(*stop_ids, *(control.get(token) for token in END_TOKENS)),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"), tokenizer=tokenizer,
    )


def _read(path: Path):
    """-> (GGUFReader, {key: value}). The reader trusts every length in the file, so it can fail in many ways.
    """
    try:
        import gguf
    except ImportError:
        raise InputError(f"{path}: reading a GGUF needs the package gguf (pip install gguf)") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflows on the way to the exception below
            reader = gguf.GGUFReader(path)
            fields = {key: field.contents() for key, field in reader.fields.items()}
        size = path.stat().st_size
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size or not tensor.n_elements:
                raise ValueError(f"tensor {tensor.name} ends after the file does")
        for tensor in {t.tensor_type: t for t in reader.tensors}.values():
            gguf.quants.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        raise InputError(f"{path}: tensors of type {tensor.tensor_type.name} cannot be dequantised") from None
    except Exception as e:
        raise InputError(f"{path}: truncated, damaged or not a GGUF file ({first_line(e)})") from None
    return reader, fields


def _config(path: Path, arch: str, fields: dict, tensors: dict, divisors) -> dict:
    """The metadata under Hugging Face's keys. Sizes that a writer may leave out are read off the tensors."""

    def get(key: str, default=None):
        value = fields.get(f"{arch}.{key}", default)
        if isinstance(value, list):
            raise InputError(f"{path}: {arch}.{key} differs from layer to layer, which is not supported")
        return value

    hidden, heads, rotary = get("embedding_length"), get("attention.head_count"), get("rope.dimension_count")
    head_dim = get("attention.key_length") or rotary or (hidden // heads if hidden and heads else None)
    if (rotary or head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{path}: heads whose keys, values and rotary part differ in size are not supported")
    embed = tensors.get("token_embd.weight")
    eps = get("attention.layer_norm_rms_epsilon")
    return {
        "vocab_size": int(embed.shape[-1]) if embed is not None else get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("expert_feed_forward_length") or get("feed_forward_length"),
        "num_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": None if eps is None else _shortest_decimal(eps),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(path, get, divisors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": get("context_length"),
        "sliding_window": get("attention.sliding_window"),
    }


def _shortest_decimal(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _rope_scaling(path: Path, get: Callable, divisors) -> dict | None:
    kind = get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn") or (kind != "none" and divisors is not None):
        raise InputError(f"{path}: rope scaling of type {kind!r} is not supported")
    if kind == "yarn":
        keys = {
            "factor": "factor", "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
        }
        values = {name: get(f"rope.scaling.{key}") for name, key in keys.items()}
        scaling = {name: value for name, value in values.items() if value is not None}
        if extra := get("rope.scaling.attn_factor"):  # llama.cpp multiplies the usual factor by it
            scaling["attention_factor"] = extra * (0.1 * math.log(scaling["factor"]) + 1)
        return {"rope_type": "yarn", **scaling}
    if divisors is not None:  # llama3 scaling is stored as one divisor per frequency
        return {"rope_type": "divisors", "divisors": [float(x) for x in divisors.data]}
    return {"rope_type": "linear", "factor": get("rope.scaling.factor")} if kind == "linear" else None


def _entry(path: Path, tensor, interleaved: int | None = None, expert: int | None = None) -> Entry:
    """One tensor, or one matrix of a stack.

    interleaved: the head size, if the rows of each head are interleaved and have to be put back in halves.
    expert: which matrix of a stack.
    """
    import gguf

    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    data = tensor.data
    if expert is not None:
        shape, data = shape[1:], data[expert]
    # Quantised types become bf16, which is precise enough for all of them.
    dtypes = {"F32": torch.float32, "F16": torch.float16}
    unit = interleaved or 1
    if shape[0] % unit:
        raise InputError(
            f"{path}: tensor {tensor.name} {list(shape)} is not a multiple of heads of {unit} rows"
        )
    rows = max(BLOCK_BYTES // (4 * math.prod(shape[1:])) // unit, 1) * unit

    def blocks() -> Iterator[Tensor]:
        for start in range(0, shape[0], rows):
            block = torch.tensor(gguf.quants.dequantize(data[start : start + rows], tensor.tensor_type))
            if interleaved:  # [heads, hd/2, 2, in] -> [heads, 2, hd/2, in]
                block = block.unflatten(0, (-1, interleaved // 2, 2)).transpose(1, 2).flatten(0, 2)
            yield block

    return Entry(shape, dtypes.get(tensor.tensor_type.name, torch.bfloat16), blocks)
