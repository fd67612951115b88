"""Sampling options of a request, and the modes of a step that they need."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from common.schema import Schema, Text, as_python, number, whole

MAX_LOGPROBS = 20  # alternatives per token
MAX_BIAS = 100.0
MAX_STOPS = 16
Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]  # not strict: in JSON's objects it is a text
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    First `logit_bias` (pairs of a token id and a number) is added to the target's logits.
    Then tokens that the text holds already are penalised: `repetition_penalty` divides what is positive and
    multiplies what is negative, for tokens of prompt and output (1: off); `frequency_penalty` is taken away
    once for each time that the output holds a token, `presence_penalty` once if it holds it (0: off).
    Then top_k applies, then top_p on what remains, both on softmax(logits / temperature), then min_p: tokens
    less than min_p times as probable as the top-1 token are left out.

    stop: texts that end the output, without being part of it. logprobs: return the log-probability of every
    token, and of the top ones, this many, as the target has them before any of the above; None: none.
    json_schema: what the output is to fit, as JSON or a dictionary. limits: `tokens.limits: Limits`, such as
    a grammar or words that must not come. Tokens that break them are masked before all that. Numbers may be
    numpy's.
    Raises ValueError on values that cannot be.
    """

    max_new_tokens: whole(1) = 256
    temperature: number(0, 1e6) = 0.0
    top_p: number(above=0, high=1) = 1.0
    top_k: whole() = 0
    seed: whole(-(2**63), 2**64 - 1) = 0
    min_p: number(0, 1) = 0.0
    presence_penalty: number(-2, 2) = 0.0
    frequency_penalty: number(-2, 2) = 0.0
    repetition_penalty: number(0.01, 100) = 1.0
    logit_bias: tuple[tuple[TokenId, number(-MAX_BIAS, MAX_BIAS)], ...] = ()  # a mapping is taken too
    stop: Stop | Stops = ()  # one text is taken too
    logprobs: whole(0, MAX_LOGPROBS) | None = None
    json_schema: Text | dict | None = None
    limits: object = None

    def __post_init__(self):
        if isinstance(self.logit_bias, Mapping):
            vars(self)["logit_bias"] = list(self.logit_bias.items())
        found = FIELDS.check({name: as_python(value) for name, value in vars(self).items()})
        stop, schema = found["stop"], found["json_schema"]
        found["json_schema"] = json.dumps(schema) if isinstance(schema, dict) else schema
        found["stop"] = (stop,) if isinstance(stop, str) else stop
        vars(self).update(found, logit_bias=tuple(sorted(found["logit_bias"])))

    @property
    def restricts(self) -> bool:
        """True if top-k or top-p restricts the tokens."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def adjusts(self) -> bool:
        """True if penalties or biases change the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    @property
    def processed(self) -> bool:
        """True if it needs `engine.state.State.processors`."""
        return self.adjusts or self.logprobs is not None or self.is_guided

    @property
    def is_guided(self) -> bool:
        """True if a guide on the host masks tokens."""
        return (self.json_schema, self.limits) != (None, None)


FIELDS = Schema(TypedDict("Fields", get_type_hints(Sampling, include_extras=True)))


class Modes(NamedTuple):
    """Additions to greedy decoding that requests of the batch need."""

    noisy: bool = False  # draws: a temperature is above 0
    restricted: bool = False  # by top-k or top-p
    cuts_min_p: bool = False  # by min_p
    adjusted: bool = False  # moves logits: by penalties, or a bias
    scored: bool = False  # gives log-probabilities
    guided: bool = False  # by a grammar, which the host looks after

    @property
    def processed(self) -> bool:
        """True if a step needs `engine.state.State.processors`."""
        return self.adjusted or self.scored or self.guided

    @property
    def rare(self) -> bool:
        """True if more is needed than the best token with its noise."""
        return any(self[1:])

    @classmethod
    def of_requests(cls, samplings: Sequence[Sampling], compiled: bool = False) -> Modes:
        """Return the modes for these requests. compiled: switch all rare modes on if any is, as where each
        combination has to be compiled.
        """
        noisy = any(s.temperature > 0 for s in samplings)
        modes = cls(
            noisy, any(s.restricts for s in samplings), noisy and any(s.min_p > 0 for s in samplings),
            any(s.adjusts for s in samplings),
            any(s.logprobs is not None for s in samplings),
            any(s.is_guided for s in samplings),
        )
        return cls.every(noisy) if compiled and modes.rare else modes

    @classmethod
    def every(cls, noisy: bool) -> Modes:
        """Return all modes at once. noisy: those of drawing, too."""
        return cls(noisy, noisy, noisy, True, True, True)
