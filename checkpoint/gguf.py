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
BLOCK_BYTES = 1 << 19  # rows are read in blocks that fit the cache and reuse malloc's memory
# Names in llama.cpp -> names in Hugging Face.
# keys: metadata keys without the prefix ARCH.; if two map to one, the later wins. divisors: tensors
# rope_NAME.weight with a factor per frequency -> key of llama3 scaling or longrope. tensors: missing in
# gguf's name table: Gemma 4, GLM, MTP layers. fused: fused tensors, split when read. leaves: added suffixes.
# interleaved: architectures with interleaved rotary pairs. "not models": by general.type.
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
LAYER_TYPES = "full_attention", "sliding_attention"
DELTA_LAYER_TYPES = "full_attention", "linear_attention"
SELECTOR = "selector_hidden.weight"  # present in DFlash2 heads


class HeadFormat(NamedTuple):
    """A draft head. family: of its layers. names, keys: of tensors and metadata, besides the family's. fixed:
    config keys of all such heads.
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
        raise InputError(f"{path}: is {other}, not a model; pass the GGUF file of the model")
    mixture = "+experts" if fields.get(f"{arch}.expert_count") else ""
    architecture = f"gguf:{HEADS[arch].family if arch in HEADS else arch}{mixture}"
    family = family_of(path, architecture)
    divisors = {key: stored.pop(f"rope_{name}.weight") for name, key in TABLES["divisors"].items()
                if f"rope_{name}.weight" in stored}
    config = _config(path, arch, family, fields, stored, divisors)
    if head := HEADS.get(arch):
        vocab_size = config.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ()))
        config |= head.fixed | {
            "vocab_size": vocab_size, "mask_token_id": fields.get("tokenizer.ggml.mask_token_id")}
    if SELECTOR in stored:
        config["architectures"] = ["DFlash2DraftModel"]
    names, layers, tensors = _names(arch, family), config.get("num_hidden_layers", 0), {}
    is_mxfp4 = {tensor.type.name for tensor in stored.values() if len(tensor.shape) == 3} == {"MXFP4"}
    for theirs, tensor in stored.items():
        name = _name(theirs, names, layers)
        stack = len(tensor.shape) > 2 and not theirs.endswith("_conv_base")
        if not stack and not theirs.endswith("_exps.bias"):
            # llama.cpp's converter interleaves the halves of each q and k head of these families.
            interleaved = arch in TABLES["interleaved"] and re.search(r"\.attn_[qk]\.weight$", theirs)
            entry = _entry(tensor, config.get("head_dim") if interleaved else None)
            tensors[name] = _as_published(name, family, entry)
            continue
        for e in range(tensor.shape[0]):  # a matrix, or a bias, for each expert
            own = name.replace("{e}", str(e)) if "{e}" in name else f"{name}[{e}]"
            if is_mxfp4 and len(tensor.shape) == 3:
                tensors[own], tensors[f"{own.removesuffix('weight')}scale"] = _mxfp4(tensor, e)
            elif "gate_up_exps" in theirs:
                half = tensor.shape[1] // 2
                for part, rows in ("gate", slice(half)), ("up", slice(half, None)):
                    tensors[own.replace("gate_up", part)] = _entry(tensor, expert=e, rows=rows)
            else:
                tensors[own] = _entry(tensor, expert=e)
    stop_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Source(
        path, architecture, config, tensors, unique_ids(*stop_ids), fields.get("tokenizer.ggml.bos_token_id"),
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
        raise InputError(f"{path}: is one of {count} parts of a split GGUF; rename the parts as"
                         " llama-gguf-split does, NAME-00001-of-00002.gguf")
    parts = [read_gguf(path.with_name(f"{named[1]}{i:05}{named[2]}")) for i in range(1, count + 1)]
    stored = {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
    count_read = sum(len(tensors) for _, tensors in parts)
    expected = parts[0][0].get("split.tensors.count", len(stored))
    numbered = [(part.get("split.no"), part.get("split.count")) for part, _ in parts]
    if numbered != [(i, count) for i in range(count)] or not len(stored) == count_read == expected:
        raise InputError(f"{path}: its parts do not belong together: {count_read} tensors, expected"
                         f" {expected}; download all parts again")
    return parts[0][0], stored


def _names(arch: str, family: Family) -> dict[str, str]:
    """Map llama.cpp's tensor names of a family, with layer 0, to Hugging Face's, with {i} and {e}."""
    if head := HEADS.get(arch):
        return _names(head.family, family) | head.names
    arch_id = next(arch_id for arch_id, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    gguf_names, names = gguf.get_tensor_name_map(arch_id, 1), {}
    for published in chain(TABLES["fused"], *family.names.values()):
        query = published.format(i=0, e="*").replace(".*", "").replace("dt_bias", "dt_proj.bias")
        query += TABLES["leaves"].get(query.rpartition(".")[2], "")
        for name in query, query.removeprefix("model."):
            if theirs := gguf_names.get_name(name, try_suffixes=(".weight", ".bias")):
                names[theirs] = published
    return TABLES["tensors"] | names


def _name(theirs: str, names: dict[str, str], layers: int) -> str:
    """Return a tensor's name in Hugging Face, with {e} for the expert; `theirs` if it has none."""
    block = re.match(r"blk\.(\d+)\.", theirs)
    name = names.get(re.sub(r"^blk\.\d+\.", "blk.0.", theirs), theirs)
    if block and int(block[1]) >= layers:  # MTP layers of a hybrid
        return name.replace("model.layers.{i}.", f"mtp.layers.{int(block[1]) - layers}.")
    return name.replace("{i}", block[1]) if block else name


def _as_published(name: str, family: Family, entry: Entry) -> Entry:
    """Invert what llama.cpp's converter did to a tensor. name: in Hugging Face."""
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
    metadata = RecordedConfig({k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)})
    get, keys = metadata.get, TABLES["keys"] | (HEADS[arch].keys if arch in HEADS else {})
    if arch == "deepseek2":  # MLA: the usual keys describe the compressed cache
        metadata.update({n: get(f"{n}_mla") for n in ("attention.key_length", "attention.value_length")})
    config = {ours: get(key) for key, ours in keys.items() if get(key) is not None}
    config |= {key: _shortest_decimal(value) for key, value in config.items() if isinstance(value, float)}
    hidden, heads, blocks = map(config.get, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    rotary, inner_size = get("rope.dimension_count"), get("ssm.inner_size")
    default_dim = hidden // heads if hidden and heads else None
    is_partial = "partial_rotary_factor" in family.defaults
    head_dim = config.get("head_dim") or (default_dim if is_partial else rotary or default_dim)
    if (not is_partial and (rotary or head_dim) != head_dim) or (
            get("attention.value_length", head_dim) != head_dim):
        raise InputError(f"{path}: heads whose keys, values and rotary part differ in size are not supported")
    value_heads = config.get("linear_num_value_heads")
    embed, period = tensors.get("token_embd.weight"), config.get("sliding_window_pattern")
    recurrent, mtp = get("attention.recurrent_layers"), get("nextn_predict_layers", 0)
    by_layer, types = (period, LAYER_TYPES) if isinstance(period, list) else (recurrent, DELTA_LAYER_TYPES)
    query_scalar = head_dim if arch == "gemma3" else None
    if arch == "gemma3" and blocks == 62 and hidden and heads:
        query_scalar = hidden // heads  # 27B has another attention scale
    config |= {
        "vocab_size": config.get("vocab_size") if embed is None else embed.shape[0],
        "num_hidden_layers": blocks and blocks - mtp,
        "num_key_value_heads": config.get("num_key_value_heads", heads), "head_dim": head_dim,
        "rope_scaling": _rope_scaling(path, arch, get, divisors),
        "tie_word_embeddings": "output.weight" not in tensors, "query_pre_attn_scalar": query_scalar,
        "norm_topk_prob": get("expert_weights_norm", True) if config.get("num_experts") else None,
        "linear_value_head_dim": inner_size // value_heads if inner_size and value_heads else None,
        "layer_types": by_layer and [types[index] for index in by_layer[: blocks - mtp]],
        **_conv_layers(config),
        "partial_rotary_factor": rotary / head_dim if is_partial and rotary and head_dim else None,
    }
    if arch == "mistral3":
        get("rope.scaling.yarn_log_multiplier")  # cancels, see `_rope_scaling`
    if arch == "gemma4":
        config |= gemma4.from_gguf(path, config, get, tensors, divisors)
    if arch == "deepseek2":
        config |= latent.from_gguf(config, rotary)
    reject_unread(path, metadata, TABLES["ignored"])
    # A family may have defaults for missing keys.
    return {key: value for key, value in config.items() if value is not None}


def _conv_layers(config: dict) -> dict:
    """Convert a list of KV head counts by layer (LFM2) to `layer_types` and one count."""
    if not isinstance(heads := config.get("num_key_value_heads"), list) or all(heads):
        return {}
    layer_types = ["full_attention" if count else "conv" for count in heads]
    return {"layer_types": layer_types, "num_key_value_heads": max(heads), "block_auto_adjust_ff_dim": False}


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _rope_scaling(path: Path, arch: str, get: Callable, divisors: dict) -> dict | None:
    # As in llama.cpp: a factor without a type means linear; files of 2023 have an older key.
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    rope_type = get("rope.scaling.type") or "linear"
    if rope_type == "linear" and factor in (None, 1):
        rope_type = "none"
    if rope_type not in ("none", "linear", "yarn") or (rope_type != "none" and divisors):
        raise InputError(f"{path}: rope scaling of type {rope_type!r} is not supported")
    if divisors:  # llama3 scaling is stored as one divisor per frequency, longrope as two
        lists = {key: tensor.dequantize().flatten().tolist() for key, tensor in divisors.items()}
        if "divisors" in lists:
            return {"rope_type": "divisors", **lists}
        return {
            "rope_type": "longrope", **lists, "attention_factor": get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
    if rope_type == "none":
        return None
    keys = {"original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    values = {name: get(f"rope.scaling.{key}") for name, key in keys.items()}
    # llama.cpp multiplies the default YaRN factor by either of these keys; OLMo 3 files have the product.
    attn_factor = get("rope.scaling.attn_factor") or get("rope.scaling.yarn_attn_factor")
    if rope_type == "yarn" and attn_factor and factor:
        values["attention_factor"] = attn_factor * (1 if arch == "olmo2" else 0.1 * math.log(factor) + 1)
    if arch == "mistral3":  # YaRN's two factors cancel
        values |= {"attention_factor": 1.0, "llama_4_scaling_beta": get("attention.temperature_scale")}
    if arch == "gpt-oss":  # a config key that GGUF lacks
        values["truncate"] = False
    return {"rope_type": rope_type, "factor": factor, **values}


def _mxfp4(tensor: GGUFTensor, expert: int) -> tuple[Entry, Entry]:
    """Return the values [N, K/2] and exponents [N, K/32] of one MXFP4 matrix, both uint8.

    A block of 32 values is an exponent and 16 bytes, whose low halves are the first 16 values.
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
    tensor: GGUFTensor, head_dim: int | None = None, expert: int | None = None, rows: slice = slice(None)
) -> Entry:
    """Return the entry of a tensor, or of one expert of a stack.

    head_dim: size of the heads if their halves are interleaved, else None. expert: index into a stack. rows:
    of that expert.
    """
    if expert is not None:
        count = len(range(*rows.indices(tensor.shape[1])))
        tensor = GGUFTensor(tensor.type, (count, *tensor.shape[2:]), tensor.data[expert][rows])
    dtype = UNQUANTIZED.get(tensor.type.name, torch.bfloat16)
    shape, rows_per_head = tensor.shape, head_dim or 1

    def in_halves(block: Tensor) -> Tensor:  # [heads, hd/2, 2, in] -> [heads, 2, hd/2, in]
        if not head_dim:
            return block
        return block.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    def by_blocks(read: Callable[[slice], tuple], itemsize: int) -> tuple:
        """Read tensors in blocks of rows. itemsize: of the largest tensor."""
        if len(shape) == 1:
            return read(slice(None))
        step = max(BLOCK_BYTES // itemsize // math.prod(shape[1:]) // rows_per_head, 1) * rows_per_head
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
        return pack_values(to, q), *regroup(gguf_type.kind, to, *scales)

    gguf_type = TYPES.get(tensor.type.name) if len(shape) == 2 else None
    # Other quantized types stay in float32, so that they are rounded only once.
    read_as = dtype if gguf_type or tensor.type.name in UNQUANTIZED else torch.float32
    return Entry(
        shape, dtype, lambda: by_blocks(lambda rows: (tensor.dequantize(rows).to(read_as),), 4)[0],
        "" if tensor.type.name in UNQUANTIZED else tensor.type.name,
        gguf_type and Grouped(gguf_type.kind, lambda to: by_blocks(partial(stored, to), 1)))
