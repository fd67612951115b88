"""Plan a converted target whose matrices keep the precision in which their source stores them."""
from __future__ import annotations

from functools import partial, reduce

import torch

from checkpoint.load import build_module
from checkpoint.source import Entry, Grouped
from checkpoint.writer import Planned
from kernels.quantized import AS_STORED, EMBED, Scheme, linear_names
from kernels.stored import Kind, regroup


def as_stored(config: dict, plan: list[Planned]) -> tuple[dict, list[Planned]]:
    """Return config and tensors of a target, its matrices as they are stored where that is known."""
    module = build_module(config)
    layers = {f"{name}.weight": name for name in [*linear_names(module, True), EMBED]}
    layers |= {name: name for name, p in module.named_parameters() if p.ndim == 3}
    kinds, tensors = {}, []
    for planned in plan:
        grouped = [part.grouped for part in planned.parts]
        if planned.name in layers and None not in grouped:
            kinds[layers[planned.name]], more = _as_stored(layers[planned.name], planned, grouped)
            tensors += more
        else:
            tensors.append(planned)
    if not kinds:
        return config, plan
    experts = config.get("quantization", {}).get("experts")
    return config | {"quantization": Scheme(AS_STORED, 0, None, experts, kinds).to_config()}, tensors


def _as_stored(layer: str, planned: Planned, grouped: list[Grouped]) -> tuple[str, list[Planned]]:
    """Return the kind that holds all parts of a layer's weight, and its tensors."""
    kind: Kind = reduce(Kind.joined, (part.kind for part in grouped))

    def read_scales(part: Grouped, which: int) -> torch.Tensor:
        return regroup(part.kind, kind, *part.scales())[which]

    read = {"weight": lambda part: partial(part.weight, kind),
            "scale": lambda part: partial(read_scales, part, 0),
            "codes": lambda part: partial(read_scales, part, 1)}
    return str(kind), [
        Planned(f"{layer}.{leaf}", (*planned.shape[:-1], columns), dtype, [
            Entry((whole.shape[0], columns), dtype, read[leaf](part))
            for whole, part in zip(planned.parts, grouped)], planned.sources)
        for leaf, (columns, dtype) in kind.sizes(planned.shape[-1]).items()]
