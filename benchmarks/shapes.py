"""Models of published shapes with random weights: speed does not depend on what the weights are."""
from __future__ import annotations

import torch
import torch.nn as nn

from checkpoint.loading import load_head, load_model
from common.errors import InputError
from kernels.quantized import Scheme, quantize_linears
from model import ModelArgs, Transformer, blank, inverse_frequencies
from networks.eagle import Eagle3Head, eagle3_aux_layers
from networks.head import Head, HeadArgs

INT4_GROUP = 64
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# The target; the draft vocabulary and the MLP width of its published EAGLE-3 head.
SHAPES = {
    "llama-3.1-8b": (
        ModelArgs(128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, LLAMA3, max_seq_len=131072), 32000, 14336
    ),
    "llama-3.2-1b": (
        ModelArgs(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, {**LLAMA3, "factor": 32.0}, True, 131072),
        32000, 8192,
    ),
    "vicuna-7b": (ModelArgs(32000, 4096, 11008, 32, 32, 32, 128, 1e-6, 1e4, max_seq_len=4096), 32000, 11008),
    "qwen3-8b": (
        ModelArgs(151936, 4096, 12288, 36, 32, 8, 128, 1e-6, 1e6, max_seq_len=40960, qk_norm=True),
        32000, 12288,
    ),
    "smollm2-135m": (ModelArgs(49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, None, True, 8192), 8192, 1536),
    "tiny": (ModelArgs(512, 64, 128, 4, 4, 2, 16, max_seq_len=4096), 256, 128),
}


def random_models(
    name: str, dtype: torch.dtype, device: str, mode: str | None, group: int = INT4_GROUP
) -> tuple[Transformer, Head]:
    """A target of this shape and its EAGLE-3 head, with random weights.

    mode: quantise both, one of `kernels.quantized.MODES`, or None. group: inputs that share a scale in int4.
    Raises InputError on an unknown shape.
    """
    if name not in SHAPES:
        raise InputError(f"--shape {name}: unknown; choose from {', '.join(SHAPES)}")
    args, draft_vocab, mlp_width = SHAPES[name]
    head_args = HeadArgs(
        args.vocab_size, args.hidden_size, mlp_width, 1, args.num_heads, args.num_kv_heads, args.head_dim,
        args.norm_eps, 1e4, max_seq_len=args.max_seq_len, draft_vocab_size=draft_vocab,
        target_hidden_size=args.hidden_size,
        aux_layers=eagle3_aux_layers(args.num_layers) if args.num_layers > 5 else (0, 2, args.num_layers),
    )
    target = _random(Transformer, args, dtype, device)
    head = _random(Eagle3Head, head_args, dtype, device)
    head.draft_ids = torch.arange(draft_vocab, device=device)
    head.use_target(target)
    _quantise(target, head, mode, group)
    return target, head


def models_of(
    checkpoint: str | None, shape: str | None, dtype: torch.dtype | None, device: str, mode: str | None
) -> tuple[Transformer, Head]:
    """A target and its EAGLE-3 head, of a checkpoint or of a named shape.

    dtype None: the stored one, bfloat16 for a shape. mode: as for `random_models`. Raises InputError.
    """
    if shape:
        return random_models(shape, dtype or torch.bfloat16, device, mode)
    target, _ = load_model(checkpoint, device, dtype)
    head = load_head(f"{checkpoint}/eagle3", target, "eagle3")
    _quantise(target, head, mode, INT4_GROUP)
    return target, head


def _random(kind: type[nn.Module], args: ModelArgs, dtype: torch.dtype, device: str) -> nn.Module:
    with blank():
        model = kind(args)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    for name, p in model.named_parameters():
        p.fill_(1.0) if name.endswith("norm.weight") else p.normal_(std=0.02)
    model.inv_freq = inverse_frequencies(args).to(device)
    return model


def _quantise(target: Transformer, head: Head, mode: str | None, group: int) -> None:
    """As `quantize.py` does: beside int4 the lm_head and the head are int8."""
    if mode:
        beside = "int8" if mode == "int4" else mode
        quantize_linears(target, Scheme(mode, group if mode == "int4" else 0, beside))
        quantize_linears(head, Scheme(beside, 0, beside))
