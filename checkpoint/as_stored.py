"""Plan the conversion of a quantized source without dequantizing it."""
from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial, reduce

import torch

from checkpoint.load import build_module
from checkpoint.source import Entry, Grouped
from checkpoint.writer import Planned
from common.cli import log_stderr
from common.errors import counted
from kernels.quantized import EMBED, linear_names
from kernels.scheme import AS_STORED, Scheme
from kernels.stored import ROUNDED, Kind, regroup, round_groups


def as_stored(config: dict, plan: list[Planned]) -> tuple[dict, list[Planned]]:
    """Return config and planned tensors, with quantized matrices kept as stored, or rounded to `ROUNDED`."""
    module = build_module(config)
    layers = {f"{name}.weight": name for name in [*linear_names(module), EMBED]}
    layers |= {name: name for name, p in module.named_parameters() if p.ndim == 3}
    kinds, tensors, rounded_types = {}, [], Counter()
    for planned in plan:
        fits = planned.name in layers and planned.shape[-1] % ROUNDED.group == 0
        if not fits or not all(part.quantized for part in planned.parts):
            tensors.append(planned)
            continue
        grouped = [part.grouped or _rounded(part) for part in planned.parts]
        mixed = len({one.kind.mode == "f8" for one in grouped}) > 1
        if mixed or not _same_input_order(grouped, planned):
            grouped = [_rounded(part) for part in planned.parts]
        rounded = [part for part, one in zip(planned.parts, grouped) if one is not part.grouped]
        rounded_types.update({part.quantized for part in rounded})
        kinds[layers[planned.name]], layer_tensors = _plan_layer(layers[planned.name], planned, grouped)
        tensors += layer_tensors
    if rounded_types:
        counts = ", ".join(f"{counted(count, 'weight')} in {name}" for name, count in rounded_types.items())
        log_stderr(f"rounding to int8 in groups of {ROUNDED.group} inputs, as no kernel supports:"
                   f" {counts}; --dtype bf16 dequantizes all")
    if not kinds:
        return config, plan
    experts = config.get("quantization", {}).get("experts")
    return config | {"quantization": Scheme(AS_STORED, 0, None, experts, kinds).to_config()}, tensors


def _same_input_order(grouped: list[Grouped], planned: Planned) -> bool:
    """Return whether all parts of a layer have the same input order, and the layer supports one."""
    first, *others = (one.order for one in grouped)
    if first is None:
        return all(order is None for order in others)
    supports_order = len(planned.shape) == 2 and planned.name != f"{EMBED}.weight"
    return supports_order and all(order is not None and torch.equal(order, first) for order in others)


def _rounded(part: Entry) -> Grouped:
    """Round a matrix to `ROUNDED`."""
    def read(to: Kind) -> tuple:
        q, scale = round_groups(part.read())
        return q, *regroup(ROUNDED, to, scale, None)

    return Grouped(ROUNDED, read)


def _plan_layer(layer: str, planned: Planned, grouped: list[Grouped]) -> tuple[str, list[Planned]]:
    """Return the kind of a layer's weight and its planned tensors."""
    kind: Kind = reduce(Kind.joined, (part.kind for part in grouped))
    sizes = kind.sizes(planned.shape[-1])
    readers = [_read_once(partial(part.read, kind), len(sizes)) for part in grouped]
    order = [] if grouped[0].order is None else [
        Planned(f"{layer}.order", planned.shape[-1:], torch.int32, [
            Entry(planned.shape[-1:], torch.int32, lambda: grouped[0].order.int())])]
    return str(kind), order + [
        Planned(f"{layer}.{leaf}", (*planned.shape[:-1], columns), dtype, [
            Entry((part.shape[0], columns), dtype, partial(read, i))
            for part, read in zip(planned.parts, readers)], planned.sources)
        for i, (leaf, (columns, dtype)) in enumerate(sizes.items())]


def _read_once(read: Callable[[], tuple], count: int) -> Callable[[int], torch.Tensor]:
    """Return a function of i that returns item i of `read`'s result and frees it; `read` runs once."""
    lock, items = threading.Lock(), []

    def take(i: int) -> torch.Tensor:
        with lock:
            items[:] = items or read()[:count]
            item, items[i] = items[i], None
            if not any(x is not None for x in items):
                items.clear()
        return item

    return take
