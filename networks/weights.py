"""Draft heads' own weights, and copies of heads."""
from __future__ import annotations

import torch
from torch import Tensor

from head import Head
from model import Transformer, meta_modules


def own_state(head: Head) -> dict[str, Tensor]:
    """Return the state dict of a head without the tensors shared by `Head.use_target`."""
    with meta_modules():
        names = type(head)(head.args).state_dict()
    return {name: t for name, t in head.state_dict().items() if name in names}


def copy_head(head: Head, target: Transformer, dtype: torch.dtype) -> Head:
    """Return a frozen copy in this dtype, on the target's device, that shares the target's weights."""
    with meta_modules():
        copy = type(head)(head.args)
    device = target.embed.device
    cast = {
        name: t.detach().to(device, dtype if t.is_floating_point() else None, copy=True)
        for name, t in own_state(head).items()
    }
    copy.load_state_dict(cast, assign=True)
    copy.inv_freq = head.inv_freq.to(device)
    copy.requires_grad_(False)
    copy.use_target(target)
    return copy
