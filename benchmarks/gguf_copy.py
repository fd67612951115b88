"""A converted target as a GGUF file for llama.cpp.

Another GGUF of the same model lends its metadata, or there is none and no tokenizer; the weights are ours.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn

from common.errors import InputError
from kernels.quantized import QuantizedLinear
from model import ModelArgs, Transformer, inverse_frequencies

WRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")  # not lent


def write_gguf(like: Path | None, target: Transformer, out: Path, kind: str) -> Path:
    """Write `target`, a LLaMA, to the file `out` and return it.

    kind: of its matrices, "BF16", "Q8_0" or "Q4_0". In Q4_0 the embedding and the lm_head are Q6_K, as
    llama.cpp's own tool has the lm_head. like: the GGUF that lends its metadata; None: only what llama-bench
    needs is written. Raises InputError if it is no GGUF, or one of another model.
    """
    writer = gguf.GGUFWriter(out, "llama", use_temp_file=True)
    _describe(writer, target.args) if like is None else _lend(writer, like, target.args)
    quant = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in _tensors(target):
        data = tensor.detach().float().cpu().numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data)
        elif kind == "Q4_0" and name in ("token_embd.weight", "output.weight"):
            writer.add_tensor(name, q6_k(data), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def q6_k(rows: np.ndarray) -> np.ndarray:
    """Rows [N, K] as Q6_K [N, bytes]: 256 values in steps of one size, 32 steps up and down. K: of 256.

    llama.cpp's tool gives every 16 values a size of their own. The bytes are as many.
    """
    blocks = rows.reshape(-1, 256)
    step = (np.abs(blocks).max(-1, keepdims=True) / 32).astype(np.float16)
    unit = np.where(step == 0, 1, step).astype(np.float32)
    q = (np.rint(blocks / unit).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    low = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    high = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    ones = np.ones((len(q), 16), np.uint8)
    return np.concatenate((low, high, ones, step.view(np.uint8)), -1).reshape(len(rows), -1)


def _describe(writer: gguf.GGUFWriter, a: ModelArgs) -> None:
    """The metadata of a LLaMA without a tokenizer, and its RoPE scaling."""
    writer.add_block_count(a.num_layers)
    writer.add_context_length(a.max_seq_len)
    writer.add_embedding_length(a.hidden_size)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_rope_dimension_count(a.head_dim)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    writer.add_rope_freq_base(a.rope_base)
    writer.add_vocab_size(a.vocab_size)
    writer.add_tokenizer_model("none")
    if a.rope_scaling:
        divisors = inverse_frequencies(replace(a, rope_scaling=None)) / inverse_frequencies(a)
        writer.add_tensor("rope_freqs.weight", divisors.numpy())


def _lend(writer: gguf.GGUFWriter, like: Path, a: ModelArgs) -> None:
    """The metadata of another file. Raises InputError."""
    try:
        fields = gguf.GGUFReader(like).fields
    except ValueError as e:
        raise InputError(f"{like}: cannot be read as GGUF ({e})") from None
    expected = {"llama.block_count": a.num_layers, "llama.embedding_length": a.hidden_size}
    size = {key: fields[key].contents() for key in expected if key in fields}
    if size != expected:
        raise InputError(
            f"{like}: is no GGUF of this LLaMA ({a.num_layers} layers, width {a.hidden_size}; found {size})"
        )
    for field in fields.values():
        if not field.name.startswith("GGUF.") and field.name not in WRITTEN:
            outer, inner = field.types[0], field.types[-1]
            inner = inner if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), outer, inner)


def _tensors(target: Transformer):
    """(GGUF's name, tensor) of everything in the file."""
    a = target.args
    yield "token_embd.weight", target.embed.weight
    yield "output_norm.weight", target.norm.weight
    if target.lm_head is not None:
        yield "output.weight", _matrix(target.lm_head)
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for i, layer in enumerate(target.layers):
        at = f"blk.{i}."
        wq, wk, wv = _matrix(layer.wqkv).split((q, kv, kv))
        yield f"{at}attn_q.weight", _interleaved(wq, a.head_dim)
        yield f"{at}attn_k.weight", _interleaved(wk, a.head_dim)
        yield f"{at}attn_v.weight", wv
        yield f"{at}attn_output.weight", _matrix(layer.wo)
        gate, up = _matrix(layer.mlp.w_gate_up).chunk(2)
        yield f"{at}ffn_gate.weight", gate
        yield f"{at}ffn_up.weight", up
        yield f"{at}ffn_down.weight", _matrix(layer.mlp.w_down)
        yield f"{at}attn_norm.weight", layer.attn_norm.weight
        yield f"{at}ffn_norm.weight", layer.mlp_norm.weight


def _matrix(layer: nn.Module) -> Tensor:
    """A layer's weight [N, K], or what a quantised one stands for."""
    return layer.dequantize(torch.float32) if isinstance(layer, QuantizedLinear) else layer.weight


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Query or key rows [heads * head_dim, H] in the order of llama.cpp's rotary embeddings for a LLaMA.

    Ours rotate the two halves of a head against each other, llama.cpp's rotate neighbouring rows.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
