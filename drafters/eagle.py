"""Drafting with an EAGLE head, on the dynamic tree of EAGLE-2/3 or the static one of EAGLE-1.

EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840; SafeAILab/EAGLE cnets.py and cnets1.py.
"""
from __future__ import annotations

import torch
from torch import Tensor

from checkpoint import load_head
from drafters.base import Request, StaticTree
from drafters.growing import Growing
from errors import CheckpointError
from model import Head
from tree import EAGLE1_TREE, PathTree, Tree, TreeShape, pick, visible_slots


class Eagle(Growing):
    """Any EAGLE head on the dynamic tree: with an EAGLE-1 head this is EAGLE-2, with an EAGLE-3 head EAGLE-3. Arguments and errors
    are those of `Growing`."""

    def __init__(self, head: Head, shape: TreeShape | PathTree, coupled: bool = True):
        super().__init__(shape, head.args.draft_vocab_size, coupled)
        self.head = head
        self.aux_layers = head.args.aux_layers
        self.cached = (head.args,)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.caches = self.head.caches(batch, slots, dtype, device)

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        # Row i pairs feature i with token i+1 and stands at position i (only differences matter to RoPE).
        next_tokens = state.tokens.gather(1, positions + 1)
        self.head(next_tokens, self.head.fuse(features), positions, positions, visible, self.caches)

    def _catch_up(self, state, slots: Tensor) -> Tensor:
        """W rows with the target's true features, of which the first n_new are real; what the others write is overwritten or never
        seen."""
        head, start = self.head, state.length - state.n_new
        positions = start[:, None] + torch.arange(self.shape.window, device=slots.device)
        next_tokens = state.tokens.gather(1, positions + 1)
        h = head(next_tokens, head.fuse(state.features), positions, positions, slots <= positions[..., None], self.caches)
        return pick(h, (state.n_new - 1).clamp(min=0)[:, None])

    def _rows(self, tokens: Tensor, feature: Tensor, positions: Tensor, own: Tensor, visible: Tensor) -> Tensor:
        return self.head(tokens, feature, positions, own, visible, self.caches)

    def _logits(self, h: Tensor) -> Tensor:
        return self.head.logits(h)

    def _ids(self, index: Tensor) -> Tensor:
        return self.head.draft_ids[index]

    def _draft_noise(self, noise: Tensor | None) -> Tensor | None:
        return noise[..., self.head.draft_ids] if noise is not None and self.coupled else None


class StaticEagle(Eagle):
    """Any EAGLE head on a static tree (EAGLE-1, arXiv 2401.15077, section 4.1): which ranks are expanded is fixed, only the
    tokens are drafted. Every index is known beforehand and kept on the device."""

    def __init__(self, head: Head, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.static = StaticTree(shape)
        for i, level in enumerate(shape.levels):
            for name in ("nodes", "rows", "came_from", "sees"):
                self.register_buffer(f"{name}_{i}", torch.tensor(getattr(level, name)), persistent=False)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate(batch, slots, dtype, device)
        self.to(device)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        noise, B = self._draft_noise(noise), state.length.shape[0]
        h = self._catch_up(state, slots)
        tokens, given, used = [state.root()[:, None]], [], 0  # given: log-probability of each node given its parent
        for i, level in enumerate(self.shape.levels):
            if i:  # expand what the level above proposed
                rows = getattr(self, f"rows_{i}")
                count = len(level.rows)
                own = state.length[:, None] + used + torch.arange(count, device=slots.device)
                sees = getattr(self, f"sees_{i}").expand(B, -1, -1)
                positions = (state.length + i - 1)[:, None].expand(-1, count)
                visible = visible_slots(slots, state.length, sees)
                h = self.head(tokens[-1][:, rows], h[:, getattr(self, f"came_from_{i}")], positions, own, visible, self.caches)
                used += count
            scores, ranked = (x.flatten(1) for x in self._best(h, noise, i, self.shape.width))  # [B, rows * width]
            nodes = getattr(self, f"nodes_{i}")
            tokens.append(ranked[:, nodes])
            given.append(scores[:, nodes])
        given = torch.cat((torch.zeros_like(given[0][:, :1]), *given), dim=1)
        return self.static.of(torch.cat(tokens, dim=1), given)


def build(request: Request) -> Eagle:
    """The head in CHECKPOINT/eagle (for "eagle" and "eagle2") or CHECKPOINT/eagle3, or where --draft says, on the tree asked for.

    Raises CheckpointError if there is none, it does not fit, or the tree does not.
    """
    kind = "eagle3" if request.method == "eagle3" else "eagle"
    folder = request.draft or request.checkpoint / kind
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no draft head there; convert one into it, name it with --draft, or use --speculate none")
    head = load_head(folder, request.target, kind)
    request.prepare(head)
    tree = request.choose_tree(head, folder) if request.tree == "auto" else request.tree
    if tree is None:
        tree = EAGLE1_TREE if request.method == "eagle" else request.default_tree
    drafts = StaticEagle if isinstance(tree, PathTree) else Eagle
    try:
        return drafts(head, tree, request.coupled)
    except ValueError as e:
        raise CheckpointError(str(e)) from None
