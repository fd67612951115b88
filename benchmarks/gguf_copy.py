"""A converted target as a GGUF file for llama.cpp.

Another GGUF of the same model lends its metadata; the weights are ours.
"""
from __future__ import annotations

from pathlib import Path

import gguf
from torch import Tensor

from common.errors import InputError
from model import Transformer

WRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")  # not lent


def write_gguf(like: Path, target: Transformer, out: Path, kind: str) -> Path:
    """Write `target`, a LLaMA, to the file `out` and return it. kind: "BF16" or "Q8_0", for its matrices.

    like: the GGUF that lends its metadata. Raises InputError if it is no GGUF, or one of another model.
    """
    try:
        fields = gguf.GGUFReader(like).fields
    except ValueError as e:
        raise InputError(f"{like}: cannot be read as GGUF ({e})") from None
    a = target.args
    expected = {"llama.block_count": a.num_layers, "llama.embedding_length": a.hidden_size}
    size = {key: fields[key].contents() for key in expected if key in fields}
    if size != expected:
        raise InputError(
            f"{like}: is no GGUF of this LLaMA ({a.num_layers} layers, width {a.hidden_size}; found {size})"
        )
    writer = gguf.GGUFWriter(out, "llama")
    for field in fields.values():
        if not field.name.startswith("GGUF.") and field.name not in WRITTEN:
            outer, inner = field.types[0], field.types[-1]
            inner = inner if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), outer, inner)
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
    """(GGUF's name, tensor) of everything in the file."""
    a = target.args
    yield "token_embd.weight", target.embed.weight
    yield "output_norm.weight", target.norm.weight
    if target.lm_head is not None:
        yield "output.weight", target.lm_head.weight
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for i, layer in enumerate(target.layers):
        at = f"blk.{i}."
        wq, wk, wv = layer.wqkv.weight.split((q, kv, kv))
        yield f"{at}attn_q.weight", _interleaved(wq, a.head_dim)
        yield f"{at}attn_k.weight", _interleaved(wk, a.head_dim)
        yield f"{at}attn_v.weight", wv
        yield f"{at}attn_output.weight", layer.wo.weight
        gate, up = layer.mlp.w_gate_up.weight.chunk(2)
        yield f"{at}ffn_gate.weight", gate
        yield f"{at}ffn_up.weight", up
        yield f"{at}ffn_down.weight", layer.mlp.w_down.weight
        yield f"{at}attn_norm.weight", layer.attn_norm.weight
        yield f"{at}ffn_norm.weight", layer.mlp_norm.weight


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Query or key rows [heads * head_dim, H] in the order of llama.cpp's rotary embeddings for a LLaMA.

    Ours rotate the two halves of a head against each other, llama.cpp's rotate neighbouring rows.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
