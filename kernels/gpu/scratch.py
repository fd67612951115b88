"""Memory that kernels share."""
from __future__ import annotations

import torch
from torch import Tensor

_arrived: dict[torch.device, Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros [n] int32, which a kernel leaves as zeros. Raises ValueError if there are fewer.

    They are made at the first call on a device, which no capture precedes, and never again: a captured graph
    keeps their address. Kernels that follow each other on one stream share them.
    """
    if device not in _arrived:
        _arrived[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    if count > len(_arrived[device]):
        raise ValueError(f"{count} groups of programs in one kernel, at most {len(_arrived[device])}")
    return _arrived[device]
