"""The Markov head and the confidence head of DSpark (arXiv 2607.05147). Definitions only.

A head that drafts several tokens from one pass guesses each without knowing the others. The Markov head adds
to its logits how likely each token is after the one before it: a product of small rank. The confidence head
says how often what a row drafts is accepted. Formulas: deepseek-ai/DeepSpec markov_head.py, "vanilla" and
"gated".
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, whole
from head import HeadArgs
from model import Linear, lm_logits


@dataclass(frozen=True, kw_only=True)
class MarkovArgs(HeadArgs):
    """Shape of a head that may have a Markov head and a confidence head."""

    mask_id: whole(0, 2**24) = 0  # the token that rows read for what is not known yet
    markov_rank: whole(0, 2**16) = 0  # 0: no Markov head
    markov_gated: Flag = False  # the row that drafts weighs each of the r numbers
    confidence: Flag = False
    confidence_reads_markov: Flag = True  # its row of `markov_in`, beside the head's

    def relations(self) -> list[tuple[str, bool, str]]:
        below = ("mask_id", self.mask_id < self.vocab_size, f"an id below vocab_size, {self.vocab_size}")
        return [*super().relations(), below]


class Markov(nn.Module):
    """The Markov and the confidence head; for classes that are a `Head` too."""

    def add_markov(self, args: MarkovArgs) -> None:
        """Make the modules."""
        H, r = args.hidden_size, args.markov_rank
        self.markov_in = nn.Embedding(args.vocab_size, r) if r else None
        self.markov_out = Linear(r, args.draft_vocab_size, bias=False) if r else None
        self.markov_gate = Linear(H + r, r, bias=True) if args.markov_gated else None
        reads = H + (r if args.confidence_reads_markov else 0)
        self.confidence = Linear(reads, 1, bias=True) if args.confidence else None

    def markov_reads(self, row: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of `markov_out` for tokens [...]: [..., r].

        row [..., H]: the lm_head's input of the rows that draft the next tokens.
        """
        read = self.markov_in(tokens)
        if self.markov_gate is not None:
            read = read * self.markov_gate(torch.cat((row, read.to(row.dtype)), -1)).sigmoid()
        return read

    def after(self, row: Tensor, tokens: Tensor) -> Tensor:
        """Return the addition to the logits of drafts that follow tokens: float32 [..., Vd]. See
        `markov_reads`."""
        return lm_logits(self.markov_out, self.markov_reads(row, tokens))

    def confidence_logit(self, row: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The logit of how often drafts are accepted [...], float32.

        The arguments are those of `markov_reads`; tokens may be left out unless `confidence_reads_markov`.
        In training it changes nothing that it reads (arXiv 2607.05147, section 3).
        """
        if self.args.confidence_reads_markov:
            row = torch.cat((row, self.markov_in(tokens).to(row.dtype)), -1)
        return lm_logits(self.confidence, row.detach())[..., 0]
