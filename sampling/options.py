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
TokenId = Annotated[int, Field(ge=0)]  # not strict: JSON objects have strings as keys
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    First `logit_bias` (pairs of a token id and a number) is added to the target's logits.
    Then tokens that the text already has are penalized: `repetition_penalty` divides positive logits and
    multiplies negative ones, for tokens of prompt and output (1: off); `frequency_penalty` is subtracted once
    for each occurrence in the output, `presence_penalty` once if there is any (0: off).
    Then top_k applies, then top_p on what remains, both on softmax(logits / temperature), then min_p: tokens
    less than min_p times as probable as the top-1 token are left out.

    stop: texts that end the output and are not part of it. logprobs: also return the log-probability of each
    token, and of this many top tokens, before all of the above; None: do not.
    json_schema: a schema that the output must fit, as JSON or a dictionary. limits: `tokens.limits: Limits`,
    such as a grammar or banned words. Forbidden tokens are masked before all of the above. Numbers may be
    numpy's.
    Raises ValueError on invalid values.
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
    """Which sampling features the requests of a step use. Each combination may be a compiled graph."""

    noisy: bool = False  # some temperature is above 0
    restricted: bool = False  # some top-k or top-p
    cuts_min_p: bool = False  # some min_p
    adjusted: bool = False  # some penalty or logit bias
    scored: bool = False  # some log-probabilities are asked for
    guided: bool = False  # some grammar, whose masks the host computes

    @property
    def processed(self) -> bool:
        """True if a step needs `engine.state.State.processors`."""
        return self.adjusted or self.scored or self.guided

    @property
    def shapes_logits(self) -> bool:
        """True if a step does more with the logits than argmax(logits + noise)."""
        return any(self[1:])

    @classmethod
    def of_requests(cls, samplings: Sequence[Sampling], compiled: bool = False) -> Modes:
        """Return the modes for these requests. compiled: if one rare mode is needed, switch on all, so that
        fewer combinations are compiled.
        """
        noisy = any(s.temperature > 0 for s in samplings)
        modes = cls(
            noisy, any(s.restricts for s in samplings), noisy and any(s.min_p > 0 for s in samplings),
            any(s.adjusts for s in samplings),
            any(s.logprobs is not None for s in samplings),
            any(s.is_guided for s in samplings),
        )
        return cls.every(noisy) if compiled and modes.shapes_logits else modes

    @classmethod
    def every(cls, noisy: bool) -> Modes:
        """Return all modes. noisy: with temperature, top-k, top-p and min-p too."""
        return cls(noisy, noisy, noisy, True, True, True)
