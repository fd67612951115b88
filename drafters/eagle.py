"""Drafting with an EAGLE head, on the dynamic tree of EAGLE-2/3 or the static one of EAGLE-1.

EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840; SafeAILab/EAGLE cnets.py and cnets1.py.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Setup
from drafters.network import HeadDrafter
from tree import EAGLE1_TREE, PathTree, Tree


class Eagle(HeadDrafter):
    """Any EAGLE head on the dynamic tree: EAGLE-2 with an EAGLE-1 head, EAGLE-3 with an EAGLE-3 head.

    Arguments and errors are those of `HeadDrafter`.
    """


class StaticEagle(Eagle):
    """Any EAGLE head on a static tree (EAGLE-1, arXiv 2401.15077, section 4.1).

    The expanded ranks are fixed and only tokens are drafted: every index is known beforehand and kept on the
    device.
    """

    grows = False

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        backend, noise, B = state.backend, self.draft_noise(noise), state.length.shape[0]
        h = self.catch_up(state, slots)
        tokens, scores, used = [state.root], [], 0
        for i, level in enumerate(self.static.levels):
            if i:  # expand what the level above proposed
                count = len(level.rows)
                own = state.length[:, None] + used + torch.arange(count, device=slots.device)
                positions = (state.length + i - 1)[:, None].expand(-1, count)
                visible = backend.visible_slots(slots, state.length, level.sees.expand(B, -1, -1))
                h = self.head(
                    tokens[-1][:, level.rows], h[:, level.came_from], positions, own, visible, self.caches
                )
                used += count
            level_scores, ranked = (x.flatten(1) for x in self._best(backend, h, noise, i, self.shape.width))
            tokens.append(ranked[:, level.nodes])  # of [B, rows * width]
            scores.append(level_scores[:, level.nodes])
        scores = torch.cat((torch.zeros_like(scores[0][:, :1]), *scores), dim=1)  # given the parent
        return self.static.of(torch.cat(tokens, dim=1), scores)


def build(setup: Setup) -> Eagle:
    """Load the head. Raises InputError if it does not fit, ValueError if the tree does not."""
    head = setup.load_head()
    given = setup.drafting.tree is not None or setup.method != "eagle"
    tree = setup.grown_tree if given else EAGLE1_TREE
    drafter = StaticEagle if isinstance(tree, PathTree) else Eagle
    return drafter(head, tree, setup.drafting.coupled)
