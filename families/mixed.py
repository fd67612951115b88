"""Caches of several classes for the layers of one target; passes over complete sequences."""
from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor

from model import KVCaches, Transformer

CHUNK, RECURRENT_CHUNK = 512, 64  # tokens per pass in `causal`; limit the size of the attention mask


class MixedCaches(nn.Module):
    """The caches of all layers, in groups of one class. locations: group and index of each layer's cache."""

    def __init__(self, groups: Iterable[KVCaches], locations: list[tuple[int, int]]):
        super().__init__()
        self.groups, self.locations = nn.ModuleList(groups), locations
        self.by_layer = [self.groups[group][index] for group, index in locations]

    def __getitem__(self, layer: int) -> nn.Module:
        return self.by_layer[layer]

    def __iter__(self):
        return iter(self.by_layer)

    def rows(self, first: int, count: int) -> MixedCaches:
        """See `KVCaches.rows`."""
        return MixedCaches([group.rows(first, count) for group in self.groups], self.locations)

    def move(self, source: Tensor, target: Tensor) -> None:
        """See `KVCaches.move`."""
        for group in self.groups:
            group.move(source, target)

    def sequence(self, slot: int, slots: int) -> list[Tensor]:
        """See `KVCaches.sequence`."""
        return [view for group in self.groups for view in group.sequence(slot, slots)]

    def reusable_prefix(self, slot: int, length: int) -> int:
        """See `KVCaches.reusable_prefix`."""
        return min(group.reusable_prefix(slot, length) for group in self.groups)

    def start_request(self, slot: int, length: int) -> None:
        """See `KVCaches.start_request`."""
        for group in self.groups:
            group.start_request(slot, length)

    def save_prefix(self, slot: int) -> None:
        """See `KVCaches.save_prefix`."""
        for group in self.groups:
            group.save_prefix(slot)


def causal(
    target: Transformer, tokens: Tensor, aux_layers: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """Run `Transformer.forward` over complete sequences [B, T], in chunks, with new caches."""
    (B, T), outputs = tokens.shape, []
    target, caches, slots = target.for_length(T), target.caches(B, T), torch.arange(T, device=tokens.device)
    size = RECURRENT_CHUNK if target.is_recurrent else CHUNK
    for start in range(0, T, size):
        chunk = slots[start : start + size].expand(B, -1)
        visible = slots[: start + size] <= chunk[..., None]
        outputs.append(target(tokens[:, start : start + size], chunk, chunk, visible, caches, aux_layers))
    x, features = zip(*outputs)
    return torch.cat(x, 1), torch.cat(features, 1) if aux_layers else None
