"""KV caches of `--kv`: float8 (e4m3) for PyTorch and our GPU kernels, int8 for the CPU operators.

In float8, values are rounded to e4m3 (Micikevicius et al. 2022, FP8 Formats for Deep Learning) and clamped to
+-448. There are no scales, as in vLLM by default: scales per head and token change little
(docs/benchmarks.md, "Caches in fp8"). Buffers are uint8, as PyTorch cannot index float8 on every device.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from common.cli import KV_DTYPES
from common.errors import InputError
from kernels.cpu_cache import CpuCache, CpuCaches
from kernels.quantized import FP8_MAX
from model import KVCache, KVCaches, lazy_zeros


def to_bytes(x: Tensor) -> Tensor:
    """Round x to e4m3, ties to even, as uint8. NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert e4m3 bytes to another dtype."""
    return x.view(torch.float8_e4m3fn).to(dtype)


class Float8Cache(KVCache):
    """`KVCache` in float8: k, v [B, S, nkv, hd] as uint8."""

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(to_bytes(k), to_bytes(v), slots)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies in `dtype`."""
        k, v = super().live(count, dtype)
        return from_bytes(k, dtype), from_bytes(v, dtype)


class Float8Caches(KVCaches):
    """`KVCaches` in float8."""

    Layer, dtype = Float8Cache, torch.uint8


class Int8Cache(CpuCache):
    """Keys and values in int8, with one scale per head and slot, see csrc/kv_int8.h.

    k, v: [B, blocks of slots, nkv, bytes of a block]; in memory, the head dimension precedes blocks.
    """

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device | str):
        nn.Module.__init__(self)
        for name, shape in zip(("k", "v"), shapes):
            buffer = lazy_zeros(shape, torch.uint8, device).transpose(1, 2)
            self.register_buffer(name, buffer, persistent=False)


class Int8Caches(CpuCaches):
    """`CpuCaches` in int8."""

    @classmethod
    def allocate(cls, args, batch, slots, dtype, device, backend) -> Int8Caches:
        block_slots, *sizes = backend.ops.int8_block_sizes(args.head_dim)
        shapes = [(batch, args.num_kv_heads, -(-slots // block_slots), size) for size in sizes]
        return cls(Int8Cache(shapes, device) for _ in range(args.num_layers))._bind(args.head_dim, backend)

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        return super().sequence(slot, -(-length // self.backend.ops.int8_block_sizes(self.head_dim)[0]))


def check_kv(kv: str, on_cpu_kernels: bool) -> None:
    """Raise InputError unless KV caches of this type, one of KV_DTYPES, run on these kernels."""
    if kv not in KV_DTYPES:
        raise InputError(f"--kv {kv}: unknown; choose from {', '.join(KV_DTYPES)}")
    if kv == "int8" and not on_cpu_kernels:
        raise InputError(
            "--kv int8: needs our CPU kernels; use --device cpu, without --no-kernels and --no-compile"
        )
    if kv == "fp8" and on_cpu_kernels:
        raise InputError("--kv fp8: our CPU kernels support only int8 caches; use --kv int8 or"
                         " --no-kernels")


def caches_of(target) -> type[KVCaches]:
    """Return the cache class of an `engine.target.Target` whose `Runtime.kv` is int8 or fp8.

    Raises InputError if its layers cannot use it.
    """
    if target.runtime.kv == "fp8":
        return target.backend.caches.get("fp8", Float8Caches)
    if not target.model.runs_on_backend:
        raise InputError(f"--kv int8: not all layers of {target.checkpoint} run on our CPU kernels (fp16,"
                         " fp8, odd sizes); leave it out")
    return Int8Caches
