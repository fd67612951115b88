"""Drafting with a smaller model of the same vocabulary (SpS).

Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318.
Its most likely continuations make the tree, the dynamic one of EAGLE-2 or, of width 1, a chain. With coupled
drafting it draws with the target's own noise, so that both draw the same token wherever their distributions
allow.
"""
from __future__ import annotations

import torch
from torch import Tensor

from checkpoint.folder import read_config
from checkpoint.loading import load_model
from common.errors import InputError
from drafters.base import Proposal, newest
from drafters.folders import model_folder
from drafters.network import NetworkDrafter
from drafters.request import Request
from drafters.tree_spec import eagle_tree
from model import Transformer
from sampling.noise import PROPOSING, stream
from tokens.tokenizer import Tokenizer
from tree import PathTree, TreeShape, pick


class DraftModel(NetworkDrafter):
    """A second target, `model`, that has read the text and the root.

    Arguments and errors are those of `NetworkDrafter`.
    """

    read_ahead = 1

    def __init__(self, model: Transformer, shape: TreeShape, coupled: bool = True, rule: str = "equal"):
        """rule "residual": proposals are drawn at random, as in the papers.

        The tree must then be a chain, else ValueError is raised.
        """
        super().__init__(shape, model.args.vocab_size, coupled)
        if rule == "residual" and (shape.width != 1 or shape.nodes != shape.depth + 2):
            raise ValueError(
                "accepting by residuals needs a chain, such as --tree 6,4,1,"
                f" not {shape.nodes},{shape.depth},{shape.width}"
            )
        self.model, self.rule = model, rule
        self.cached = (model.args,)

    @property
    def network(self) -> Transformer:
        return self.model

    def allocate(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.caches = self.model.caches(batch, slots)

    def read(self, state, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        self.model(state.tokens.gather(1, positions), positions, positions, visible, self.caches)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        if noise is None or self.rule != "residual":
            return super().propose(state, slots, noise)
        temperature = state.temperature[:, None, None]
        positions = state.length[:, None] + 1 + torch.arange(self.shape.window - 1, device=slots.device)
        key = stream(state.key, PROPOSING)
        own = state.backend.gumbel(key, positions, state.temperature, self.model.args.vocab_size)
        logits: list[Tensor] = []
        h = self.catch_up(state, slots)
        grown = self.grow(h, state, slots, own, self.shape, logits)
        tree = state.backend.prune(grown, state.root())
        return Proposal(tree, (torch.cat(logits, 1) / temperature.clamp(min=1e-6)).softmax(-1))

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read up to W rows that end with the root; the last step committed the last n_new of them."""
        start, rows = state.length - state.n_new + 1, state.backend.unread_rows(state)
        positions = start[:, None] + torch.arange(rows, device=slots.device)
        visible = state.backend.visible_before(slots, start, rows)
        h, _ = self.model(state.tokens.gather(1, positions), positions, positions, visible, self.caches)
        return pick(h, newest(state, h.shape[1]))

    def _rows(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        return self.model(tokens, positions, own, visible, self.caches)[0]

    def _logits(self, h: Tensor) -> Tensor:
        return self.model.logits(h)


def build(request: Request) -> DraftModel:
    """The converted model that --draft names.

    Raises InputError if it is missing or speaks another vocabulary, ValueError if the tree does not fit.
    """
    folder = model_folder(request.draft)
    if isinstance(request.tree, PathTree) or request.tree == "auto":
        raise InputError("--speculate draft-model: takes --tree paper or nodes,depth,width only")
    own, target = read_config(folder, "target"), request.target.args
    if own["vocab_size"] != target.vocab_size:
        raise InputError(
            f"{folder}: has a vocabulary of {own['vocab_size']}, the target one of {target.vocab_size}"
        )
    if own["max_seq_len"] < request.max_seq_len:
        raise InputError(
            f"{folder}: reads {own['max_seq_len']} tokens, there is room for {request.max_seq_len};"
            f" --max-seq-len {own['max_seq_len']} is what both read"
        )
    if request.tokenizer:
        tokenizer = Tokenizer.load(folder)
        if tokenizer is None:
            raise InputError(
                f"{folder}: has no tokenizer files to compare with the target's; copy its own there"
            )
        if not tokenizer.same_ids(request.tokenizer):
            raise InputError(f"{folder}: its tokenizer gives other ids than the target's")
    weight = request.target.embed.weight
    ranks = request.target.ranks and request.target.ranks.of_heads
    model, _ = load_model(folder, weight.device, weight.dtype, ranks)
    request.prepare(model)
    chain = TreeShape(6, 4, 1) if request.rule == "residual" else None
    tree = eagle_tree(request.tree or chain or request.default_tree)
    return DraftModel(model, tree, request.coupled, request.rule)
