"""Losslessness check: speculative output equals plain output, except for rounding.

With the batch-invariant CPU kernels, outputs must be identical in any dtype. Elsewhere logits depend on the
batch shape, and a different token may win a near tie. The first token that differs is rescored in float32: it
is a tie if the logits of both tokens differ by at most `bound`. Later tokens are not compared.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoint.load import load_model, read_config
from common.cli import is_out_of_memory
from engine.sampling import gumbel, seed_keys
from evaluation.answers import Answer
from families.mixed import causal
from kernels.tp import Ranks
from model import Transformer
from tokens.tokenizer import common_prefix

# Assumed maximum rounding error of a logit, relative to the largest logit. Measured errors are a tenth of it.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# Modes that quantize activations, and fp8 KV caches: a tiny difference may round to the next quantized value.
QUANTIZED_TOLERANCE = {"fp8": 2**-4, "w8a8": 2**-5, "w4a8": 2**-5, "stored": 2**-5}


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer differs from the plain answer."""

    set: str
    question: int | str
    method: str
    temperature: float
    turn: int
    token: int  # index in the turn's answer
    plain: int  # token id of plain decoding; -1: the answer has ended
    other: int  # token id of the method; -1: the answer has ended
    gap: float  # float32 logit of `plain` - logit of `other`
    bound: float  # maximum gap attributed to rounding

    @property
    def tie(self) -> bool:
        """Whether the difference is within rounding error."""
        return abs(self.gap) <= self.bound


def first_difference(plain: Answer, other: Answer) -> tuple[int, int] | None:
    """Return (turn, token) of the first difference between two answers, None if they are equal."""
    for turn, (a, b) in enumerate(zip(plain.turns, other.turns)):
        same = common_prefix(a.ids, b.ids)
        if same < max(len(a.ids), len(b.ids)):
            return turn, same
    return None


class Judge:
    """Rescore differences with the target in float32. It is loaded at the first difference.

    Falls back to the CPU if the device is out of memory.
    """

    def __init__(
        self, checkpoint: str, dtype: torch.dtype, device: str, batch_invariant: bool = False,
        ranks: Ranks | None = None, kv: str = "auto",
    ):
        """Set the tolerance for the engines' dtype, device and kv (see `engine.target.Runtime`).

        batch_invariant: no difference is a tie. ranks: of a sharded target; all ranks must call `difference`
        with the same answers.
        """
        self.checkpoint, self.device, self.ranks = checkpoint, device, ranks
        mode = read_config(checkpoint).get("quantization", {}).get("mode")
        tolerances = [QUANTIZED_TOLERANCE.get(name, TOLERANCE[dtype]) for name in (mode, kv)]
        self.tolerance = 0.0 if batch_invariant else max(tolerances)
        self._target: Transformer | None = None

    @torch.no_grad()
    def difference(self, plain: Answer, other: Answer) -> Difference | None:
        """Return the first difference from the plain answer to the same question and seed, or None."""
        position = first_difference(plain, other)
        if position is None:
            return None
        turn, token = position
        a, b = plain.turns[turn], other.turns[turn]
        ids = [t.ids[token] if token < len(t.ids) else -1 for t in (a, b)]
        fields = plain.set, plain.question, other.method, plain.temperature, turn, token, *ids
        if -1 in ids:  # one answer is a prefix of the other: never a tie
            return Difference(*fields, gap=float("inf"), bound=0.0)
        logits = self._logits(a.prompt + a.ids[:token])
        bound = self.tolerance * float(logits.abs().max())
        if plain.temperature:
            key = seed_keys([plain.seed], self.device)
            position = torch.tensor([[len(a.prompt) + token]], device=self.device)
            logits = logits + plain.temperature * gumbel(key, position, len(logits))[0, 0]
        return Difference(*fields, gap=float(logits[ids[0]] - logits[ids[1]]), bound=bound)

    def _logits(self, prefix: list[int]) -> torch.Tensor:
        """Return the float32 logits [V] of the token after `prefix`."""
        if self._target is None:
            try:
                self._target, _ = load_model(self.checkpoint, self.device, torch.float32, self.ranks)
            except RuntimeError as e:
                if self.ranks or not is_out_of_memory(e):
                    raise
                self.device = "cpu"
                self._target, _ = load_model(self.checkpoint, self.device, torch.float32)
        ids = torch.tensor([prefix], device=self.device)
        return self._target.logits(causal(self._target, ids)[0][:, -1])[0]
