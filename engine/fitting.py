"""How many of a target's layers stay in the host's memory (`--offload`), by arithmetic from files' headers.

What weights and caches take is exact. What is computed with, and what CUDA's libraries take, is estimated.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from checkpoint.folder import check_config, read_config
from checkpoint.loading import layer_of
from checkpoint.names import ADVICE, WEIGHTS
from checkpoint.weights import bytes_of, listed
from common.cli import LEAST_OFFLOADED
from common.errors import InputError
from drafters import METHODS
from drafters.folders import kind_of, of_draft
from drafters.kept import Ring
from engine.api import Drafting, longest_text
from engine.body import GPU_CHUNKS, SPAN, round_up
from engine.memory import free_memory
from engine.runtime import Runtime, check_offload
from model import KVCaches, ModelArgs

ROOMS = 2
LIBRARIES = 1 << 30  # bytes: CUDA's libraries, captured graphs, gaps between what is allocated
NODES = 64  # rows of a text whose logits are there at once
LOGITS = 3  # of these: with noise, and as they are drawn from


@dataclass(frozen=True)
class Needs:
    """Bytes that decoding takes on a device: of each layer, of the target's other weights, of what drafts, of
    all caches, and of what is computed.
    """

    layers: tuple[int, ...]
    rest: int
    drafting: int
    caches: int
    computing: int

    @classmethod
    def of(
        cls, checkpoint: Path, dtype: torch.dtype | None, draftings: Iterable[Drafting], batch: int,
        max_seq_len: int | None, kv: str = "auto",
    ) -> Needs:
        """What a decoder for each way of drafting takes, with `batch` texts at a time.

        dtype: that weights are loaded in; None: as they are stored. kv: `Runtime.kv`. Raises InputError on
        damaged folders.
        """
        config = read_config(checkpoint, "target")
        args, weights = check_config(config), _weights(checkpoint, dtype)
        longest = longest_text(args.max_seq_len, max_seq_len)
        room = GPU_CHUNKS[-1] + 1
        slots = round_up(longest + room, SPAN) + SPAN
        own = dtype or weights["embed.weight"][0]
        layers = [0] * args.num_layers
        for name, (_, size) in weights.items():
            if layer_of(name) >= 0:
                layers[layer_of(name)] += size
        drafting = caches = 0
        for one in draftings:
            caches += _cached(args, batch, slots, torch.float8_e4m3fn if kv == "fp8" else own)
            held = Ring(one.window).count(slots, room) if one.window else slots
            for folder in _folders(one, checkpoint):
                drafting += sum(size for _, size in _weights(folder, own).values())
                caches += _cached(check_config(read_config(folder)), batch, held, own)
        rest = sum(size for _, size in weights.values()) - sum(layers)
        computing = _computing(args, "quantization" in config, batch, own) + LIBRARIES
        return cls(tuple(layers), rest, drafting, caches, computing)

    def weights(self, count: int) -> int:
        """Bytes of the target's weights on the device if `count` layers are offloaded."""
        return self.rest + sum(self.layers[: len(self.layers) - count]) + self.rooms(count)

    def rooms(self, count: int) -> int:
        """Bytes of the rooms that offloaded layers come to."""
        return ROOMS * max(self.layers[-count:]) if count else 0

    def total(self, count: int) -> int:
        """Bytes of all on the device if `count` layers are offloaded."""
        return self.weights(count) + self.drafting + self.caches + self.computing

    def least(self, free: int) -> int:
        """The fewest layers to offload so that the rest fits into so many bytes.

        Raises InputError, with the numbers, if it never does.
        """
        counts = 0, *range(LEAST_OFFLOADED, len(self.layers) + 1)
        for count in counts:
            if self.total(count) <= free:
                return count
        raise InputError(
            f"--offload auto: with {counts[-1]} of {len(self.layers)} layers in the host's memory"
            f" {self.total(counts[-1]) / 1e9:.2f} GB are still needed on the GPU, {free / 1e9:.2f} GB are"
            " free: lower --max-seq-len or the number of texts decoded together, or quantise"
        )

    def told(self, count: int, free: int) -> str:
        """One line about it."""
        most, away = len(self.layers), sum(self.layers[-count:]) if count else 0
        rooms = f", {self.rooms(count) / 1e9:.2f} GB of it room for these layers" if count else ""
        return (
            f"offload: {count} of {most} layers ({away / 1e9:.2f} GB) stay in the host's memory; on the GPU"
            f" {self.weights(count) / 1e9:.2f} GB of weights{rooms}, {self.drafting / 1e9:.2f} GB of what"
            f" drafts, {self.caches / 1e9:.2f} GB of caches and, by estimate, {self.computing / 1e9:.2f} GB"
            f" to compute with: {self.total(count) / 1e9:.2f} of {free / 1e9:.2f} GB free"
        )


def _weights(folder: Path, dtype: torch.dtype | None) -> dict[str, tuple[torch.dtype, int]]:
    """The weights of a folder: dtype and bytes of each, once it is loaded."""
    found = {}
    for name, stored in listed(folder / WEIGHTS, ADVICE).items():
        width = bytes_of(name, stored, dtype)
        kind = torch.float32 if width == 4 else torch.bfloat16
        found[name] = kind, prod(stored.shape) * width
    return found


def _folders(drafting: Drafting, checkpoint: Path) -> list[Path]:
    """Of what drafts, the folders that are there. Whoever loads them says what is missing."""
    names = [name for name in drafting.method.split("+") if METHODS[name] and not METHODS[name].headless]
    named = of_draft(names, drafting.draft)
    folders = (
        Path(drafting.draft) if drafting.draft and name in named else checkpoint / kind_of(name)
        for name in names
    )
    return [folder for folder in folders if folder.is_dir()]


def _cached(args: ModelArgs, batch: int, slots: int, dtype: torch.dtype) -> int:
    return KVCaches.bytes(args, batch, slots, dtype)


def _computing(args: ModelArgs, quantised: bool, batch: int, dtype: torch.dtype) -> int:
    """Bytes that a pass over a chunk of prompts computes with, and those of the logits of a tree.

    All experts compute all rows of a long pass, with whole matrices made of their weights if these are
    quantised.
    """
    H, inner, experts = args.hidden_size, args.intermediate_size, max(1, args.num_experts)
    heads = (args.num_heads + 2 * args.num_kv_heads) * args.head_dim
    rows = batch * GPU_CHUNKS[-1] * (4 * H + 2 * heads + 3 * inner * experts) * dtype.itemsize
    matrices = 2 * inner * H * args.num_experts * (4 + dtype.itemsize) if quantised else 0
    return rows + matrices + batch * NODES * args.vocab_size * 4 * LOGITS


def settle(
    asked: int | str | None, checkpoint: Path, runtime: Runtime, draftings: Iterable[Drafting], batch: int,
    max_seq_len: int | None, say: Callable[[str], None],
) -> Runtime:
    """The runtime with as many layers offloaded as --offload says, or as do not fit: "auto".

    asked None: unchanged. `say` is told what takes which memory. Raises InputError if the device is no GPU,
    the target has not so many layers, or they do not fit in the host's memory either.
    """
    if asked is None:
        return runtime
    check_offload(runtime.device_name)
    needs = Needs.of(checkpoint, runtime.torch_dtype, draftings, batch, max_seq_len, runtime.kv)
    free = free_memory(torch.device(runtime.device_name))
    count, most = needs.least(free) if asked == "auto" else asked, len(needs.layers)
    if count > most:
        raise InputError(f"--offload {count}: {checkpoint} has {most} layers")
    line = needs.told(count, free)
    away, on_host = sum(needs.layers[most - count :]), free_memory(torch.device("cpu"))
    if on_host is not None and away > on_host:
        raise InputError(f"{line}; of the host's memory {on_host / 1e9:.2f} GB are free")
    say(line)
    return replace(runtime, offload=count)
