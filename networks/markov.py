"""The Markov head and the confidence head of DSpark (arXiv 2607.05147).

Block heads predict several tokens independently. The Markov head adds low-rank bigram logits, conditioned on
the previous token. The confidence head predicts acceptance. Formulas: deepseek-ai/DeepSpec markov_head.py,
"vanilla" and "gated".
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, whole
from head import HeadArgs
from model import Linear


@dataclass(frozen=True, kw_only=True)
class MarkovArgs(HeadArgs):
    """Shape of a head that may have a Markov head and a confidence head."""

    mask_id: whole(0, 2**24) = 0  # the mask token
    markov_rank: whole(0, 2**16) = 0  # 0: no Markov head
    markov_gated: Flag = False  # scale the r values by sigmoid(markov_gate([hidden, values]))
    confidence: Flag = False
    confidence_reads_markov: Flag = True  # it also reads markov_in(previous token)

    def constraints(self) -> list[tuple[str, bool, str]]:
        below = ("mask_id", self.mask_id < self.vocab_size, f"an id below vocab_size, {self.vocab_size}")
        return [*super().constraints(), below]


class Markov(nn.Module):
    """Mixin of `Head` with a Markov head and a confidence head."""

    def add_markov(self, args: MarkovArgs) -> None:
        """Create the modules."""
        H, r = args.hidden_size, args.markov_rank
        self.markov_in = nn.Embedding(args.vocab_size, r) if r else None
        self.markov_out = Linear(r, args.draft_vocab_size, bias=False) if r else None
        self.markov_gate = Linear(H + r, r, bias=True) if args.markov_gated else None
        width = H + (r if args.confidence_reads_markov else 0)
        self.confidence = Linear(width, 1, bias=True) if args.confidence else None

    def markov_input(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of `markov_out` for tokens [...]: [..., r].

        hidden [..., H]: final hidden states (lm_head inputs) at the positions that follow `tokens`.
        """
        x = self.markov_in(tokens)
        if self.markov_gate is not None:
            x = x * self.markov_gate(torch.cat((hidden, x.to(hidden.dtype)), -1)).sigmoid()
        return x

    def markov_logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits to add for drafts after tokens: float32 [..., Vd]. Arguments: see `markov_input`.
        """
        return self.markov_out.logits(self.markov_input(hidden, tokens))

    def confidence_logit(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return the logit of the acceptance probability of drafts [...], float32.

        Arguments: see `markov_input`; tokens are needed if `confidence_reads_markov`. Its inputs are
        detached (arXiv 2607.05147, section 3).
        """
        if self.args.confidence_reads_markov:
            hidden = torch.cat((hidden, self.markov_in(tokens).to(hidden.dtype)), -1)
        return self.confidence.logits(hidden.detach())[..., 0]
