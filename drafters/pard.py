"""Draft models: one token a pass, or all levels of a tree in one pass (PARD).

PARD (arXiv 2504.18583): a small model of the target's vocabulary that was trained to predict later tokens
from mask tokens after the root. Its config.json names the mask token: `pard_token`.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.block import OnePassDrafter, full_depth_tree
from drafters.draft_model import DraftModel, load_drafter
from engine.draft import last_unread
from engine.drafting import DrafterSetup
from model import Transformer
from tree import TreeShape, gather_tokens

LEVELS = 8  # of the default tree


class Pard(OnePassDrafter, DraftModel):
    """A draft model that reads mask tokens after the root (PARD). mask_id: the mask token.

    Other arguments and errors are those of `DraftModel`.
    """

    def __init__(self, model: Transformer, shape: TreeShape, coupled: bool = True, *, mask_id: int):
        super().__init__(model, shape, coupled)
        self.mask_id = mask_id

    def _draft(self, state, W: int, positions: Tensor, own: Tensor, visible: Tensor) -> Tensor:
        known = state.tokens.gather(1, positions[:, :W])
        tokens = torch.cat((known, known.new_full((len(known), self.block_rows), self.mask_id)), 1)
        h, _ = self.model(tokens, positions, own, visible, self.caches)
        return torch.cat((gather_tokens(h, last_unread(state, W)), h[:, W:]), 1)


def build(setup: DrafterSetup) -> DraftModel:
    """Load the model of --draft. Errors are those of `load_drafter`."""
    (model, own), tree, coupled = load_drafter(setup), setup.tree, setup.options.coupled
    if (mask := own.get("pard_token")) is None:
        return DraftModel(model, tree, coupled)
    usual = setup.options.tree in (None, "auto")
    return Pard(model, full_depth_tree(tree, LEVELS) if usual else tree, coupled, mask_id=mask)
