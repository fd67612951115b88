"""Sampling options of a request, and the modes of a step that they need."""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# The rules by which drafted nodes are accepted at temperature > 0; at 0 both are `equal`.
RULES = {"equal": "gives the text of plain decoding (default)", "residual": "draws anew, for draft-model"}
MOST_LOGPROBS = 20  # of the likeliest tokens, beside the one that was taken
MOST_BIAS = 100.0
MOST_PENALTY = 2.0
MOST_STOPS = 16


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    First `logit_bias` (pairs of a token id and a number) is added to the target's logits.
    Then tokens that the text holds already are penalised: `repetition_penalty` divides what is positive and
    multiplies what is negative, for tokens of prompt and output (1: off); `frequency_penalty` is taken away
    once for each time that the output holds a token, `presence_penalty` once if it holds it (0: off).
    Then top_k applies, then top_p on what remains, both on softmax(logits / temperature), then min_p: tokens
    less than min_p times as likely as the likeliest are left out.

    stop: texts that end the output, without being part of it. logprobs: return the log-probability of every
    token, and of this many of the likeliest, as the target has them before any of the above; None: none.
    json_schema: what the output is to fit, as JSON; of the logits, all that breaks it is left out first.
    Raises ValueError on values that cannot be.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # a mapping is taken too
    stop: tuple[str, ...] = ()  # one text is taken too
    logprobs: int | None = None
    json_schema: str | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 to 1,000,000, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or more, and below 2^31, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be 0 to 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MOST_PENALTY <= getattr(self, name) <= MOST_PENALTY:
                raise ValueError(f"{name} must be -2 to 2, got {getattr(self, name)}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty must be 0.01 to 100, got {self.repetition_penalty}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be 0 to {MOST_LOGPROBS}, got {self.logprobs}")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MOST_STOPS or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be at most {MOST_STOPS} texts, none of them empty")
        object.__setattr__(self, "stop", stop)

    @property
    def restricts(self) -> bool:
        """True if top-k or top-p restricts the tokens."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def penalises(self) -> bool:
        """True if the text so far changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _token_id(token: int | str) -> int:
    """A token id, which in JSON's objects is a text. Raises ValueError."""
    if isinstance(token, str) and not re.fullmatch(r"-?[0-9]{1,18}", token):
        raise ValueError(token)
    return int(token)


def _pairs(bias: Mapping | Iterable) -> tuple[tuple[int, float], ...]:
    """A logit bias as sorted pairs of numbers. Raises ValueError."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    try:
        found = tuple(sorted((_token_id(token), float(value)) for token, value in pairs))
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must be pairs of a token id and a number, got {bias!r:.200}") from None
    for token, value in found:
        if token < 0 or not math.fabs(value) <= MOST_BIAS:
            raise ValueError(
                f"logit_bias: {token}: {value}: a token id is not negative, a bias -{MOST_BIAS:g} to"
                f" {MOST_BIAS:g}"
            )
    return found


class Modes(NamedTuple):
    """Additions to greedy decoding that requests of the batch need."""

    noisy: bool = False  # draws: a temperature is above 0
    restricted: bool = False  # by top-k or top-p
    floored: bool = False  # by min_p
    adjusted: bool = False  # moves logits: by penalties, or a bias
    scored: bool = False  # gives log-probabilities
    guided: bool = False  # by a grammar, which the host looks after

    @classmethod
    def of(cls, samplings: Iterable[Sampling], few: bool = False) -> Modes:
        """Return the modes for these requests. few: switch all rare modes on if any is, as where each
        combination has to be compiled.
        """
        samplings = list(samplings)
        noisy = any(s.temperature > 0 for s in samplings)
        modes = cls(
            noisy, any(s.restricts for s in samplings), noisy and any(s.min_p > 0 for s in samplings),
            any(s.penalises or s.logit_bias for s in samplings),
            any(s.logprobs is not None for s in samplings),
            any(s.json_schema is not None for s in samplings),
        )
        if few and any(modes[2:5]):
            return cls(noisy, noisy, noisy, True, True, modes.guided)
        return modes
