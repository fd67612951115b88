"""Medusa (Cai et al., arXiv 2401.10774) and Hydra (Ankner et al., arXiv 2402.05109): heads and drafter.

Heads read z, the target's last hidden state after the final norm, at the last committed token. Head k (from
0) predicts the token k+1 positions after the root. Medusa's heads are independent (FasterDecoding/Medusa
medusa_model.py). Hydra's are conditioned on the tokens drafted before (zankner/Hydra prefix_mlp_head.py,
mlp_head.py).

The tree is static. `--tree paper` is the published tree; the default on a CPU is smaller. Hydra's published
code pads short paths with their last token, and may accept padding. Nothing is padded here.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError
from common.schema import Flag, whole
from drafters.static import PathTree, StaticHeadDrafter, expected_tree
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from head import Head, HeadArgs
from model import KVCaches, Linear, PassInputs, RMSNorm, TargetBlock
from tree import PAPER_TREE, Tree

PUBLISHED_LEVELS = 4  # of `published_tree`


@dataclass(frozen=True, kw_only=True)
class MultiTokenArgs(HeadArgs):
    """Shape of Medusa or Hydra heads; sizes of attention and MLP are those of Hydra++'s layer."""

    guesses: whole(1, 64) = 4  # K, the number of heads
    blocks: whole(1, 64) = 1  # residual blocks of a head; Hydra's first one narrows to H
    lm_head_each: Flag = False  # else heads share one: own (`own_lm_head`) or the target's
    lm_head_bias: Flag = False
    prefix: Flag = False  # Hydra++

    @property
    def drafts(self) -> int:
        """The number of draft tokens: levels of a tree below the root."""
        return self.guesses


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), with a learned projection of x where the width changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=True)
        self.skip = Linear(inputs, outputs, bias=True) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.skip is None else self.skip(x)) + F.silu(self.linear(x))


def stack_of(args: MultiTokenArgs, inputs: int) -> nn.Sequential:
    """Return the residual blocks of one head, [..., inputs] -> [..., H]: the first one narrows its inputs."""
    sizes = inputs, *[args.hidden_size] * (args.blocks - 1)
    return nn.Sequential(*(ResidualBlock(size, args.hidden_size) for size in sizes))


class MultiTokenHeads(Head):
    """Base class of Medusa and Hydra heads: `head_logits` reads what `forward` returns."""

    Args = MultiTokenArgs
    reads_normed = True

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        H, V = args.hidden_size, args.draft_vocab_size
        count = args.guesses if args.lm_head_each else 0
        self.lm_heads = nn.ModuleList(Linear(H, V, bias=args.lm_head_bias) for _ in range(count))

    def caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        return super().caches(batch, slots, dtype, device) if self.args.prefix else None

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        """Hidden states z [B, T, H] -> p [B, T, H], which is z without Hydra++'s layer."""
        return feature

    def head_logits(self, p: Tensor, paths: Tensor) -> Tensor:
        """Return float32 logits of the tokens after paths [B, R, k + 1], the root first: [B, R or 1, Vd].

        p [B, 1, H]: see `forward`.
        """
        k = paths.shape[-1] - 1
        h = self.stacks[k](self.stack_input(p, paths))
        return self.lm_heads[k].logits(h) if self.args.lm_head_each else self.lm_head.logits(h)


class MedusaHeads(MultiTokenHeads):
    """K independent stacks of residual blocks."""

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        self.stacks = nn.ModuleList(stack_of(args, args.hidden_size) for _ in range(args.guesses))

    def stack_input(self, p: Tensor, paths: Tensor) -> Tensor:
        """Return the input of stack k [B, 1, H], which does not depend on drafted tokens."""
        return p


class HydraHeads(MultiTokenHeads):
    """Head k reads p, the root and k drafted tokens.

    p is z; in Hydra++ a layer computes p from all z so far.
    """

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        H = args.hidden_size
        self.prefix_layer = TargetBlock(args) if args.prefix else None
        self.prefix_norm = RMSNorm(H, args.norm_eps) if args.prefix else None
        self.stacks = nn.ModuleList(stack_of(args, (k + 2) * H) for k in range(args.guesses))

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        if self.prefix_layer is None:
            return feature
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        return self.prefix_norm(self.prefix_layer(feature, caches[0], shared))

    def stack_input(self, p: Tensor, paths: Tensor) -> Tensor:
        """Return the input of stack k [B, R, (k + 2) * H]."""
        return torch.cat((p.expand(-1, paths.shape[1], -1), self.embed(paths).flatten(-2)), -1)


class MultiToken(StaticHeadDrafter):
    """Draft a static tree level by level with `MultiTokenHeads`."""

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        head, noise, p = self.head, self.draft_noise(noise), self.catch_up(step, state, slots)  # [B, 1, H]
        paths, tokens = state.root[..., None], [state.root]
        scores = [torch.zeros_like(p[..., 0], dtype=torch.float32)]
        for i, level in enumerate(self.static.levels):
            if i:  # expand nodes of the previous level
                paths = torch.cat((paths[:, level.parent_rows], tokens[-1][:, level.rows, None]), -1)
            level_noise = None if noise is None else noise[:, i, None]
            logits = head.head_logits(p, paths)
            ranked = step.rank(logits, level_noise, self.shape.width, self._draft_ids)
            for levels, x in zip((scores, tokens), ranked):
                levels.append(x.expand(-1, paths.shape[1], -1).flatten(1)[:, level.nodes])
        return self.static.with_tokens(torch.cat(tokens, 1), torch.cat(scores, 1))


def published_tree() -> PathTree:
    """Return the tree named mc_sim_7b_63 in FasterDecoding/Medusa: 64 nodes on four levels.

    The published Medusa and Hydra figures were measured on it.
    """
    paths = json.loads((Path(__file__).parent / "medusa_tree.json").read_text())
    return PathTree(tuple(map(tuple, paths)))


def build(setup: DrafterSetup) -> MultiToken:
    """Load the heads for a static tree: --tree FILE, the published one, or one of the default size.

    Raises InputError if heads or tree do not fit.
    """
    tree, default = setup.options.tree, setup.default_tree
    if not (tree in (None, "paper") or isinstance(tree, PathTree)):
        raise InputError(f"--speculate {setup.method}: takes a static tree: --tree FILE, a JSON list of paths"
                         " of ranks, or --tree paper")
    head = setup.load_head()
    if tree == "paper" or (tree is None and default == PAPER_TREE and head.args.guesses >= PUBLISHED_LEVELS):
        tree = published_tree()
    return MultiToken(head, tree or expected_tree(default.nodes, head.args.guesses), setup.options.coupled)
