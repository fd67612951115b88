"""A converted target as a GGUF file for llama.cpp: another GGUF of the same model lends its metadata, the
weights are ours.
"""
from __future__ import annotations

from pathlib import Path

import gguf
from torch import Tensor

from common.errors import InputError
from model import Transformer

# GGUF's names of a layer's parts; q, k, v and gate, up are rows of one tensor of ours.
NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
# Metadata that the writer adds.
OUR_OWN = ("general.architecture", "general.file_type", "general.quantization_version")


def write_gguf(like: Path, target: Transformer, out: Path, kind: str) -> Path:
    """Write `target`, a LLaMA, to `out`, its matrices as "BF16" or "Q8_0".

    Raises InputError if `like` is no GGUF, or one of another model.
    """
    try:
        fields = gguf.GGUFReader(like).fields
    except ValueError as e:
        raise InputError(f"{like}: cannot be read as GGUF ({e})") from None
    a = target.args
    found = {
        key: fields[f"llama.{key}"].contents() for key in ("block_count", "embedding_length")
        if f"llama.{key}" in fields
    }
    if found != {"block_count": a.num_layers, "embedding_length": a.hidden_size}:
        raise InputError(
            f"{like}: is no GGUF of this LLaMA ({a.num_layers} layers, width {a.hidden_size}; found {found})"
        )
    writer = gguf.GGUFWriter(out, "llama")
    for field in fields.values():
        if not field.name.startswith("GGUF.") and field.name not in OUR_OWN:
            kind_of, is_array = field.types[0], field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), kind_of, field.types[-1] if is_array else None)
    quant = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in _tensors(target):
        data = tensor.detach().float().cpu().numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _tensors(target: Transformer):
    """(name, tensor) of everything in the file."""
    a = target.args
    yield "token_embd.weight", target.embed.weight
    yield "output_norm.weight", target.norm.weight
    if target.lm_head is not None:
        yield "output.weight", target.lm_head.weight
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for i, layer in enumerate(target.layers):
        at = f"blk.{i}."
        parts = layer.wqkv.weight.split((q, kv, kv))
        yield f"{at}attn_q.weight", _interleaved(parts[0], a.head_dim)
        yield f"{at}attn_k.weight", _interleaved(parts[1], a.head_dim)
        yield f"{at}attn_v.weight", parts[2]
        yield f"{at}attn_output.weight", layer.wo.weight
        for name, part in zip(("gate", "up"), layer.mlp.w_gate_up.weight.chunk(2)):
            yield f"{at}ffn_{name}.weight", part
        yield f"{at}ffn_down.weight", layer.mlp.w_down.weight
        for ours, theirs in NORMS.items():
            yield f"{at}{theirs}.weight", getattr(layer, ours).weight


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads in halves, as we rotate them, to rows in pairs, as llama.cpp does for a LLaMA."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
