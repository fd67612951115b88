"""Draft with a smaller language model that shares the target's tokenizer.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The draft is EAGLE-2's dynamic tree, or a
chain if the width is 1. Coupled drafting reuses the target's Gumbel noise, so that both models tend to sample
the same token.
"""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from checkpoint.load import load_model, read_config
from common.errors import InputError
from engine.draft import NetworkDrafter, catch_up_inputs, last_unread
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from model import KVCaches, Transformer
from tokens.tokenizer import Tokenizer
from tree import TreeShape, gather_tokens


class DraftModel(NetworkDrafter):
    """Draft with a `Transformer` that has its own KV cache. Arguments and errors: see `NetworkDrafter`."""

    read_ahead, resizable = 1, True
    max_trees = TreeShape(20, 15, 2), TreeShape(16, 7, 2)

    def __init__(self, model: Transformer, shape: TreeShape, coupled: bool = True):
        super().__init__(shape, model.args.vocab_size, coupled)
        if model.is_recurrent:  # its state cannot be rolled back after rejected drafts
            raise InputError("--draft: recurrent models cannot draft for another model yet")
        self.model = model

    @property
    def network(self) -> Transformer:
        return self.model

    def new_caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches:
        return self.model.caches(batch, slots, device)

    def prefill(self, state: State, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        self.model(state.tokens.gather(1, positions), positions, positions, visible, self.caches)

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Read up to W tokens that end with the root; the last n_unread are new."""
        positions, visible = catch_up_inputs(step, state, slots, ahead=1)
        h, _ = self.model(state.tokens.gather(1, positions), positions, positions, visible, self.caches)
        return gather_tokens(h, last_unread(state, h.shape[1]))

    def expand(self, costs, scores: Tensor, level: int) -> int:
        # Acceptance is higher than a head's and falls less with depth, hence a larger gain per child.
        return costs.expand(scores, self.shape.width, child_gain=0.8, above=level + 1)

    def _forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor
    ) -> Tensor:
        return self.model(tokens, positions, slots, visible, self.caches)[0]


def load_drafter(setup: DrafterSetup) -> tuple[Transformer, dict]:
    """Load the model of --draft. Returns (model, its config.json).

    Raises InputError if the vocabularies differ, the context is too short, or --tree is static.
    """
    folder, target = setup.folder, setup.target
    if not isinstance(setup.tree, TreeShape):
        raise InputError("--speculate draft-model: --tree must be auto, paper or nodes,depth,width")
    config, vocab_size = read_config(folder, "target"), target.args.vocab_size
    # Vocabularies padded to different sizes are allowed if the tokenizers agree, checked below.
    if config["vocab_size"] != vocab_size and (target.ranks or not setup.tokenizer):
        raise InputError(f"{folder}: has a vocabulary of {config['vocab_size']} tokens, the target one of"
                         f" {vocab_size}; use a model with the target's vocabulary")
    if config["max_seq_len"] < setup.max_seq_len:
        raise InputError(f"{folder}: has a context of {config['max_seq_len']} tokens, less than"
                         f" {setup.max_seq_len}; use --max-seq-len {config['max_seq_len']}")
    if setup.tokenizer:
        tokenizer = Tokenizer.load(folder)
        if tokenizer is None or not same_ids(tokenizer, setup.tokenizer):
            what = "a tokenizer with other ids than the target's" if tokenizer else "no tokenizer"
            raise InputError(f"{folder}: has {what}; choose a model of the target's family")
        if tokenizer.vocab_size > min(config["vocab_size"], vocab_size):
            raise InputError(f"{folder}: has {config['vocab_size']} rows in its embedding, the target"
                             f" {vocab_size};"
                             f" their tokenizer has {tokenizer.vocab_size} ids")
    table, ranks = target.embed, target.ranks and target.ranks.for_heads
    model, _ = load_model(folder, table.device, table.dtype, ranks)
    resize_vocabulary(model, vocab_size)
    setup.prepare(model)
    model = model.for_length(setup.max_seq_len)
    return model, config


def resize_vocabulary(model: Transformer, size: int) -> None:
    """Cut or pad (with copies of the last row) embedding and lm_head to `size` rows, in place."""
    rows = torch.arange(size).clamp(max=model.args.vocab_size - 1)
    for layer in filter(None, (model.embed, model.lm_head) if size != model.args.vocab_size else ()):
        for name, tensor in layer.named_parameters():
            if name != "order":  # which permutes the inputs; other tensors have a row for each token id
                # PyTorch cannot index fp8 tensors: index their bytes.
                resized = tensor.data.view(torch.uint8)[rows.to(tensor.device)]
                tensor.data = resized.view(tensor.dtype)
        if hasattr(layer, "outputs"):  # a quantized layer
            layer.outputs = size
    model.args = replace(model.args, vocab_size=size)


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Return whether both tokenizers map every id to the same bytes or control token."""
    same_layout = a.vocab_size == b.vocab_size and a.control == b.control
    return same_layout and all(a.piece(i) == b.piece(i) for i in range(a.vocab_size))
