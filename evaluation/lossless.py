"""Whether speculative text is plain text, and where it is not, whether rounding could have decided.

In float32, and on our CPU kernels in any dtype, the texts must be equal. Elsewhere 16-bit passes over one row
and over many round differently, so two nearly equal logits may change places: the first difference of a text
is scored again in float32, and counts as a tie if the two tokens are closer than `bound`; where texts must be
equal, none does. What follows a difference is another text, and not compared.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoint.folder import read_config
from checkpoint.loading import load_model
from evaluation.runs import Answer
from model import Transformer
from sampling.noise import gumbel, seed_keys
from tokens.ids import common_prefix

# Of the largest logit: how far rounding may move one. Twice the unit of the dtype; differences seen are a
# tenth of it.
TIE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# Where activations are rounded on top, what 16 bits moved a little may round to the next of fewer values.
ROUNDED_TIE = {"fp8": 2**-4, "w8a8": 2**-5}


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the plain one: turn, token, the two ids, and in float32 how far the plain one is
    ahead.
    """

    set: str
    question: int | str
    method: str
    temperature: float
    turn: int
    token: int
    plain: int
    other: int
    gap: float
    bound: float

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return abs(self.gap) <= self.bound


def first_difference(plain: Answer, other: Answer) -> tuple[int, int] | None:
    """(turn, token) where two answers part, None if they do not."""
    for turn, (a, b) in enumerate(zip(plain.turns, other.turns)):
        same = common_prefix(a.ids, b.ids)
        if same < max(len(a.ids), len(b.ids)):
            return turn, same
    return None


class Judge:
    """Scores differences; the target in float32 is loaded when the first one is met."""

    def __init__(self, checkpoint: str, dtype: torch.dtype, device: str, exact: bool = False):
        """exact: on kernels whose rows do not depend on each other, where no difference is a tie."""
        self.checkpoint, self.device = checkpoint, device
        mode = read_config(checkpoint).get("quantization", {}).get("mode")
        self.share = 0.0 if exact else ROUNDED_TIE.get(mode, TIE[dtype])
        self.target: Transformer | None = None

    @torch.no_grad()
    def difference(self, plain: Answer, other: Answer) -> Difference | None:
        """The first difference of an answer to the plain one of the same question, temperature and seed."""
        where = first_difference(plain, other)
        if where is None:
            return None
        turn, token = where
        a, b = plain.turns[turn], other.turns[turn]
        ids = [t.ids[token] if token < len(t.ids) else -1 for t in (a, b)]
        given = plain.set, plain.question, other.method, plain.temperature, turn, token, *ids
        if -1 in ids:  # one ends where the other goes on: nothing that rounding does
            return Difference(*given, float("inf"), 0.0)
        if self.target is None:
            try:
                self.target, _ = load_model(self.checkpoint, self.device, torch.float32)
            except RuntimeError:  # no room beside the target itself
                self.device = "cpu"
                self.target, _ = load_model(self.checkpoint, self.device, torch.float32)
        prefix = torch.tensor([a.prompt + a.ids[:token]], device=self.device)
        logits = self.target.logits(self.target.causal(prefix)[0][:, -1])[0]
        bound = self.share * float(logits.abs().max())
        if plain.temperature:
            position = torch.tensor([[prefix.shape[1]]], device=self.device)
            logits = logits + plain.temperature * gumbel(
                seed_keys([plain.seed], self.device), position, len(logits)
            )[0, 0]
        return Difference(*given, float(logits[ids[0]] - logits[ids[1]]), bound)
