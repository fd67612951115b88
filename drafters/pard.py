"""Draft models: one level of the tree per pass, or all levels in one pass (PARD).

PARD (arXiv 2504.18583): a small model of the target's vocabulary that was trained to predict later tokens
from mask tokens after the root. Its config.json names the mask token: `pard_token`. PARD-2 (arXiv 2605.08632)
also reads the target's features of the previous token; mask tokens get the last known features.
"""
from __future__ import annotations

import torch
from torch import Tensor

from common.errors import InputError
from drafters.block import OnePassDrafter, full_depth_tree
from drafters.draft_model import DraftModel, load_drafter
from engine.draft import HeadDrafter, last_unread
from engine.drafting import DrafterSetup
from engine.state import State
from model import Transformer
from networks.pard2 import Pard2
from tree import TreeShape, gather_tokens

LEVELS = 8  # of the default tree


class Pard(OnePassDrafter, DraftModel):
    """A draft model that reads mask tokens after the root (PARD). mask_id: id of the mask token.

    Other arguments and errors are those of `DraftModel`.
    """

    def __init__(self, model: Transformer, shape: TreeShape, coupled: bool = True, *, mask_id: int):
        super().__init__(model, shape, coupled)
        self.mask_id = mask_id

    def _draft(self, state, W: int, positions: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        known = state.tokens.gather(1, positions[:, :W])
        tokens = torch.cat((known, known.new_full((len(known), self.num_mask_tokens), self.mask_id)), 1)
        h, _ = self.model(tokens, positions, slots, visible, self.caches, **self.more_inputs(state, W))
        return torch.cat((gather_tokens(h, last_unread(state, W)), h[:, W:]), 1)

    def more_inputs(self, state, W: int) -> dict:
        """Return further arguments of the model for a pass over W tokens and the mask tokens."""
        return {}


class Pard2Drafter(Pard):
    """A draft model that also reads the target's features (PARD-2).

    norm: of the target's last output. last [B, F]: the features of the token before the next unread one.
    """

    buffers_by_slot = ("last",)

    def __init__(self, model: Pard2, shape: TreeShape, coupled: bool = True, *, target: Transformer, **mask):
        super().__init__(model, shape, coupled, **mask)
        args, depth = model.args, target.args.num_layers
        self.aux_layers = tuple(i + depth + 1 if i < 0 else i for i in args.feature_layers)
        if args.feature_size != len(self.aux_layers) * target.args.hidden_size or not (
                0 <= self.aux_layers[0] <= self.aux_layers[-1] <= depth):
            raise InputError(f"--draft: the draft model reads features of size {args.feature_size} from"
                             f" layers {list(args.feature_layers)}; the target has {depth} layers of size"
                             f" {target.args.hidden_size}; use another draft model or target")
        reads_output = self.aux_layers[-1] == depth
        self.normed_size = target.args.hidden_size if reads_output else 0
        self.norm = (target.norm,)  # in a tuple: else it would be registered as a submodule

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate(batch, slots, dtype, device)
        last = torch.zeros(batch, self.model.args.feature_size, dtype=dtype, device=device)
        self.register_buffer("last", last, persistent=False)

    def _update_last(self, last: Tensor, active: Tensor) -> None:
        """Update `last` of active sequences [B]."""
        self.last.copy_(torch.where(active[:, None], last, self.last))

    def own_features(self, features: Tensor) -> Tensor:
        features = HeadDrafter.own_features(self, features)
        if not self.normed_size:
            return features
        raw, last = features.split((features.shape[-1] - self.normed_size, self.normed_size), dim=-1)
        return torch.cat((raw, self.norm[0](last.contiguous())), dim=-1)

    def prefill(self, state: State, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        features, tokens = self.own_features(features), state.tokens.gather(1, positions)
        before = torch.where(positions[:, :1] > 0, self.last, 0)[:, None]
        self._update_last(features[:, -1], state.prefilling | ~state.done)
        self.model(tokens, positions, positions, visible, self.caches,
                   features=torch.cat((before, features[:, :-1]), 1))

    def more_inputs(self, state: State, W: int) -> dict:
        features = self.own_features(state.features[:, :W])
        last = gather_tokens(features, last_unread(state, W))
        self._update_last(last[:, 0], ~state.done)
        return {"features": torch.cat((features, last.expand(-1, self.num_mask_tokens, -1)), 1)}


def build(setup: DrafterSetup) -> DraftModel:
    """Load the model of --draft. Errors are those of `load_drafter`."""
    (model, config), tree, coupled = load_drafter(setup), setup.tree, setup.options.coupled
    if (mask_id := config.get("pard_token")) is None:
        return DraftModel(model, tree, coupled)
    if setup.options.tree in (None, "auto"):
        tree = full_depth_tree(tree, LEVELS)
    if isinstance(model, Pard2):
        return Pard2Drafter(model, tree, coupled, mask_id=mask_id, target=setup.target)
    return Pard(model, tree, coupled, mask_id=mask_id)
