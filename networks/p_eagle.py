"""The head of P-EAGLE."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import whole
from head import Head
from networks.eagle31 import Eagle31Args, Eagle31Head
from networks.markov import Markov, MarkovArgs


@dataclass(frozen=True, kw_only=True)
class PEagleArgs(MarkovArgs, Eagle31Args):
    """Shape of a P-EAGLE head."""

    drafts: whole(1, 256) = 8  # tokens per pass in training: maximum levels of a tree


class PEagleHead(Eagle31Head, Markov):
    """The head of P-EAGLE (arXiv 2602.01469): EAGLE-3 with all draft steps in one pass.

    Positions after the first read the embedding of `mask_id` and the feature `mask_hidden` (names:
    vllm-project/vllm#32887).
    """

    Args = PEagleArgs

    def __init__(self, args: PEagleArgs):
        super().__init__(args)
        self.mask_hidden = nn.Parameter(torch.zeros(args.feature_width))
        self.feeds_residual = False
        self.add_markov(args)

    def rows(self, h: Tensor) -> Tensor:
        """Output of `forward` [..., H] -> the input of lm_head, Markov and confidence head [..., H]."""
        return h if self.args.recycle_normed else self.norm(h)

    def logits(self, feature: Tensor) -> Tensor:
        """Output of `rows` [..., H] -> float32 draft logits [..., Vd], without the Markov head."""
        return Head.logits(self, feature)
