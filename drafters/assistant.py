"""Draft with a Gemma 4 assistant, which attends to the target's KV cache and has none of its own."""
from __future__ import annotations

import torch
from torch import Tensor

import engine.draft
from checkpoint.load import read_config
from common.errors import InputError
from engine.draft import HeadDrafter, last_unread
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from tree import TreeShape, gather_tokens


class AssistantDrafter(HeadDrafter):
    """Grows trees with an assistant. Nodes attend to the committed tokens, not to each other."""

    def new_caches(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str):
        """Return the target's caches, which the engine has just allocated."""
        return None if device == "meta" else self.head.target[0].newest_caches()

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        return []

    def prefill(self, state: State, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        pass

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Run over the root, with the feature that it was sampled from."""
        features, self.length = self.own_features(state.features), state.length[:, None]
        self.committed = slots < self.length[..., None]
        last = self.head.fuse(gather_tokens(features, last_unread(state, features.shape[1])))
        return self._forward(state.root, last, self.length, self.length, self.committed)

    def _forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor
    ) -> Tensor:
        # All nodes have the root's position and mask.
        count = tokens.shape[1]
        positions, visible = self.length.expand(-1, count), self.committed.expand(-1, count, -1)
        return self.head(tokens, feature, positions, slots, visible.contiguous(), self.caches)


def build(setup: DrafterSetup) -> HeadDrafter:
    """Build the drafter of an assistant, or of an MTP layer. Raises InputError if it does not fit."""
    if not read_config(setup.folder).get("global_head_dim"):
        return engine.draft.build(setup)
    if not isinstance(setup.tree, TreeShape):
        raise InputError("--speculate mtp: --tree must be auto, paper or nodes,depth,width with this head")
    return AssistantDrafter(setup.load_head(), setup.tree, setup.options.coupled)
