"""Losslessness: speculative text equals plain text, except for near ties.

On our batch-invariant CPU kernels, texts must be equal in any dtype. Elsewhere results depend on the batch
shape, and nearly equal logits may change order. The first difference of a text is scored again in float32 and
is a tie if the logits of the two tokens differ by at most `bound`. Text after a difference is not compared.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoint.load import load_model, read_config
from common.cli import no_memory
from engine.sampling import gumbel, seed_keys
from evaluation.answers import Answer
from families.mixed import causal
from kernels.tp import Ranks
from model import Transformer
from tokens.tokenizer import common_prefix

# Largest rounding error of a logit, relative to the largest logit: twice the epsilon of the dtype. Measured
# errors are a tenth of it.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# Modes that round activations, and fp8 caches: small differences may lead to the next quantized value.
QUANTIZED_TOLERANCE = {"fp8": 2**-4, "w8a8": 2**-5, "w4a8": 2**-5, "stored": 2**-5}


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer is not the plain one."""

    set: str
    question: int | str
    method: str
    temperature: float
    turn: int
    token: int  # index in the turn's answer
    plain: int  # the token id of each; -1 after the last one
    other: int
    gap: float  # lead of the plain token's logit in float32
    bound: float  # largest gap that rounding explains

    @property
    def tie(self) -> bool:
        """True if rounding explains the difference."""
        return abs(self.gap) <= self.bound


def first_difference(plain: Answer, other: Answer) -> tuple[int, int] | None:
    """Return (turn, token) of the first difference between two answers, None if they are equal."""
    for turn, (a, b) in enumerate(zip(plain.turns, other.turns)):
        same = common_prefix(a.ids, b.ids)
        if same < max(len(a.ids), len(b.ids)):
            return turn, same
    return None


class Judge:
    """Scores differences with the target in float32, loaded at the first difference.

    It is loaded on the CPU if the device has no memory left.
    """

    def __init__(
        self, checkpoint: str, dtype: torch.dtype, device: str, exact: bool = False,
        ranks: Ranks | None = None, kv: str = "auto",
    ):
        """dtype, device, kv: of the engines that answered, see `engine.runtime.Runtime`.

        exact: the kernels are batch-invariant, so no difference is a tie. ranks: of a sharded target; all
        score the same texts.
        """
        self.checkpoint, self.device, self.ranks = checkpoint, device, ranks
        mode = read_config(checkpoint).get("quantization", {}).get("mode")
        bounds = [QUANTIZED_TOLERANCE.get(of, TOLERANCE[dtype]) for of in (mode, kv)]
        self.tolerance = 0.0 if exact else max(bounds)
        self._target: Transformer | None = None

    @torch.no_grad()
    def difference(self, plain: Answer, other: Answer) -> Difference | None:
        """Return the first difference from the plain answer with the same seed, None if equal."""
        found = first_difference(plain, other)
        if found is None:
            return None
        turn, token = found
        a, b = plain.turns[turn], other.turns[turn]
        ids = [t.ids[token] if token < len(t.ids) else -1 for t in (a, b)]
        where = plain.set, plain.question, other.method, plain.temperature, turn, token, *ids
        if -1 in ids:  # one text ended early: not a rounding error
            return Difference(*where, gap=float("inf"), bound=0.0)
        logits = self._logits(a.prompt + a.ids[:token])
        bound = self.tolerance * float(logits.abs().max())
        if plain.temperature:
            key = seed_keys([plain.seed], self.device)
            position = torch.tensor([[len(a.prompt) + token]], device=self.device)
            logits = logits + plain.temperature * gumbel(key, position, len(logits))[0, 0]
        return Difference(*where, gap=float(logits[ids[0]] - logits[ids[1]]), bound=bound)

    def _logits(self, prefix: list[int]) -> torch.Tensor:
        """Return the float32 logits [V] after these tokens."""
        if self._target is None:
            try:
                self._target, _ = load_model(self.checkpoint, self.device, torch.float32, self.ranks)
            except RuntimeError as e:
                if self.ranks or not no_memory(e):
                    raise
                self.device = "cpu"
                self._target, _ = load_model(self.checkpoint, self.device, torch.float32)
        ids = torch.tensor([prefix], device=self.device)
        return self._target.logits(causal(self._target, ids)[0][:, -1])[0]
