"""Models of published shapes with random weights: speed does not depend on what the weights are."""
from __future__ import annotations

import zlib
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

from checkpoint.folder import FORMAT
from checkpoint.loading import build_module, load_head, load_model
from checkpoint.source import Entry
from checkpoint.writer import Planned, fill, staging
from common.errors import InputError
from kernels.modes import BESIDE, FOUR_BITS
from kernels.quantized import Scheme, quantize_linears
from model import ModelArgs, Transformer, blank, inverse_frequencies
from networks.eagle import Eagle3Head
from networks.head import Head, HeadArgs
from networks.read_states import eagle3_aux_layers

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

    mode: quantise both, one of `kernels.quantized.MODES`, or None. group: inputs that share a scale in 4
    bits. Raises InputError on an unknown shape.
    """
    target = _random(Transformer, shape_of(name)[0], dtype, device)
    head = _random_head(name, target)
    _quantise(target, head, mode, group)
    return target, head


def shape_of(name: str) -> tuple[ModelArgs, int, int]:
    """An entry of `SHAPES`. Raises InputError on an unknown one."""
    if name not in SHAPES:
        raise InputError(f"--shape {name}: unknown; choose from {', '.join(SHAPES)}")
    return SHAPES[name]


def blank_models(name: str, dtype: torch.dtype) -> tuple[Transformer, Head]:
    """The same without weights, on the meta device: what their sizes are. Raises InputError."""
    with blank():
        target, head = Transformer(shape_of(name)[0]), Eagle3Head(_head_args(name))
        head.use_target(target)
    return target.to(dtype), head.to(dtype)


def random_head(name: str, target: Transformer, mode: str) -> Head:
    """The EAGLE-3 head of a target of this shape, with random weights, quantised."""
    head = _random_head(name, target)
    quantize_linears(head, Scheme(mode, 0, mode))
    return head


def _head_args(name: str) -> HeadArgs:
    args, draft_vocab, mlp_width = SHAPES[name]
    return HeadArgs(
        args.vocab_size, args.hidden_size, mlp_width, 1, args.num_heads, args.num_kv_heads, args.head_dim,
        args.norm_eps, 1e4, max_seq_len=args.max_seq_len, draft_vocab_size=draft_vocab,
        target_hidden_size=args.hidden_size,
        aux_layers=eagle3_aux_layers(args.num_layers) if args.num_layers > 5 else (0, 2, args.num_layers),
    )


def _random_head(name: str, target: Transformer) -> Head:
    device, args = target.embed.weight.device, _head_args(name)
    head = _random(Eagle3Head, args, target.embed.weight.dtype, device)
    head.draft_ids = torch.arange(args.draft_vocab_size, device=device)
    head.use_target(target)
    return head


def write_random(name: str, mode: str, out: Path) -> Path:
    """Write a folder with a target of this shape and random weights of 4 bits, one tensor after the other.

    Q4_0 and Q6_K hold them exactly: every 32 weights of a layer include -8; the embedding and the lm_head
    have 6 bits, every 256 include -32, and the scale is a power of two. Raises InputError on an unknown
    shape.
    """
    scheme = Scheme(mode, INT4_GROUP, BESIDE[mode])
    args = asdict(shape_of(name)[0]) | {"tie_embeddings": False}
    config = {"format": FORMAT, "name": name, "kind": "target", **args, "stop_ids": [], "bos_id": None}
    config["quantization"] = asdict(scheme)

    def values(name: str, meta: torch.Tensor) -> torch.Tensor:
        seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name.endswith("norm.weight"):
            return torch.ones(meta.shape, dtype=meta.dtype)
        if meta.dtype == torch.uint8:
            stored = torch.randint(0, 256, meta.shape, dtype=torch.uint8, generator=seed)
            stored[:, ::16] &= 0xF0
            return stored
        if name == "lm_head.scale":
            return torch.full(meta.shape, 2.0**-10)
        if name.endswith(".scale"):
            return ((torch.rand(meta.shape, generator=seed) + 1) * 2**-8).to(meta.dtype)
        q = torch.randint(-32, 32, meta.shape, generator=seed, dtype=torch.int8)
        q[:, ::256] = -32
        return q if name == "lm_head.weight" else (q * 2.0**-10).to(torch.bfloat16)

    plan = []
    for key, meta in build_module(config).state_dict().items():
        dtype = torch.bfloat16 if meta.dtype == torch.float32 and not key.endswith(".scale") else meta.dtype
        read = partial(values, key, torch.empty(meta.shape, dtype=dtype, device="meta"))
        plan.append(Planned(key, tuple(meta.shape), dtype, [Entry.of(meta.shape, dtype, read)]))
    with staging(out, sum(t.nbytes for t in plan)) as folder:
        fill(folder, config, plan, quiet=True)
    return out


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
    """As `quantize.py` does: beside 4 bits the lm_head and the head have 8."""
    if mode:
        beside = BESIDE.get(mode, mode)
        quantize_linears(target, Scheme(mode, group if mode in FOUR_BITS else 0, beside))
        quantize_linears(head, Scheme(beside, 0, beside))
