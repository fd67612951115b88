"""Sampling: the options of a request, the modes of a step that they need, and the noise.

The token at absolute position t of a sequence is argmax(logits + temperature * g). g is standard Gumbel noise
that depends only on (seed of the request, t, token id): not on call order, batch slot, tree or drafter. This
equals softmax sampling at that temperature (the Gumbel-max trick). Plain and speculative decoding use the
same noise at the same position, so they emit the same text from the same seed. Temperature 0 is greedy
decoding. Top-k, top-p and min-p are masks over logits that treat ties alike on every device.
"""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, get_type_hints

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from common.schema import Schema, Text, as_python, number, whole

MAX_LOGPROBS = 20  # alternatives per token
MAX_BIAS = 100.0
MAX_STOPS = 16
Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]  # not strict: JSON objects have strings as keys
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]
MASK32 = 0xFFFFFFFF
# Odd multipliers of a 32-bit finalizer found by search for low avalanche bias (hash-prospector). Both are
# below 2^31, so that 32-bit values can be multiplied exactly in int64: the same bits on every device, eager
# or compiled.
_MULTIPLIERS = 0x21F0AAAD, 0x735A2D97
_GOLDEN = 0x1E3779B9  # odd, below 2^31: spreads consecutive counters


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one request. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    First `logit_bias` (pairs of a token id and a bias) is added to the target's logits.
    Then repeated tokens are penalized: `repetition_penalty` divides positive logits and multiplies negative
    ones, for tokens of prompt and output (1: off); `frequency_penalty` is subtracted once for each occurrence
    in the output, `presence_penalty` once if there is any (0: off).
    Then top_k applies, then top_p on what remains, both on softmax(logits / temperature), then min_p: tokens
    less than min_p times as probable as the top-1 token are masked.

    stop: strings that end the output and are not part of it. logprobs: also return the log-probability of
    each token, and of this many top tokens, before all of the above; None: do not.
    json_schema: a schema that the output must match, as JSON or a dictionary. limits: `tokens.limits.Limits`,
    such as a grammar or banned words. Forbidden tokens are masked before all of the above. Numbers may be
    numpy's. Raises InputError on invalid values.
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
    logit_bias: tuple[tuple[TokenId, number(-MAX_BIAS, MAX_BIAS)], ...] = ()  # or a mapping
    stop: Stop | Stops = ()  # or one string
    logprobs: whole(0, MAX_LOGPROBS) | None = None
    json_schema: Text | dict | None = None
    limits: object = None

    def __post_init__(self):
        if isinstance(self.logit_bias, Mapping):
            vars(self)["logit_bias"] = list(self.logit_bias.items())
        checked = FIELDS.check({name: as_python(value) for name, value in vars(self).items()})
        stop, schema = checked["stop"], checked["json_schema"]
        checked["json_schema"] = json.dumps(schema) if isinstance(schema, dict) else schema
        checked["stop"] = (stop,) if isinstance(stop, str) else stop
        vars(self).update(checked, logit_bias=tuple(sorted(checked["logit_bias"])))

    @property
    def adjusts(self) -> bool:
        """True if penalties or biases change the logits."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    @property
    def needs_processors(self) -> bool:
        """True if it needs `engine.state.State.processors`."""
        return self.adjusts or self.logprobs is not None or self.is_guided

    @property
    def is_guided(self) -> bool:
        """True if a guide on the host masks tokens."""
        return (self.json_schema, self.limits) != (None, None)


FIELDS = Schema(TypedDict("Fields", get_type_hints(Sampling, include_extras=True)))


class Modes(NamedTuple):
    """Which sampling features the requests of a step use. Each combination may be a compiled graph."""

    sampled: bool = False  # some temperature is above 0
    restricted: bool = False  # some top-k or top-p
    has_min_p: bool = False  # some min_p
    adjusted: bool = False  # some penalty or logit bias
    scored: bool = False  # some log-probabilities are asked for
    guided: bool = False  # some grammar, whose masks the host computes

    @property
    def is_rare(self) -> bool:
        """True if few requests need these modes: their part of a step is not compiled."""
        return any(self[2:])

    @property
    def changes_logits(self) -> bool:
        """True if a step does more with the logits than argmax(logits + noise)."""
        return any(self[1:])

    @classmethod
    def of_requests(cls, samplings: Sequence[Sampling], compiled: bool = False) -> Modes:
        """Return the modes for these requests.

        compiled: return one of four combinations, for few graphs: sampling implies top-k and top-p, a rare
        mode implies all modes.
        """
        sampled = any(s.temperature > 0 for s in samplings)
        modes = cls(
            sampled, any(s.temperature > 0 and (s.top_p < 1 or s.top_k > 0) for s in samplings),
            sampled and any(s.min_p > 0 for s in samplings), any(s.adjusts for s in samplings),
            any(s.logprobs is not None for s in samplings), any(s.is_guided for s in samplings),
        )
        if compiled:
            return cls.all_modes(sampled) if modes.is_rare else cls(sampled, sampled)
        return modes

    @classmethod
    def all_modes(cls, sampled: bool) -> Modes:
        """Return all modes. sampled: with temperature, top-k, top-p and min-p too."""
        return cls(sampled, sampled, sampled, True, True, True)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values (held in int64) in which every input bit affects every output bit."""
    x = ((x ^ (x >> 16)) * _MULTIPLIERS[0]) & MASK32
    x = ((x ^ (x >> 15)) * _MULTIPLIERS[1]) & MASK32
    return x ^ (x >> 15)


def seed_keys(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Integer seeds (any size, taken modulo 2^64) -> key [B, 2] int64 of 32-bit words."""
    words = [[seed & MASK32, (seed >> 32) & MASK32] for seed in seeds]
    return torch.tensor(words, dtype=torch.int64, device=device)


def random_bits(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Keyed 32-bit hashes [B, W, V] (int64, 0..2^32-1) for key [B, 2] and positions [B, W].

    Each (seed, position) gets two independent words; the token id is hashed under both, so that two positions
    never see shifted copies of one another's sequence.
    """
    low, high = key[:, :1], key[:, 1:]
    a = _mix(_mix(positions + low & MASK32) ^ high)  # [B, W]
    b = _mix(_mix(positions ^ high) + 0x5851F42D + low & MASK32)
    ids = torch.arange(vocab_size, device=key.device, dtype=torch.int64) * _GOLDEN & MASK32
    return _mix(_mix(ids + a[..., None] & MASK32) ^ b[..., None])


def gumbel(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, W, V] float32 for key [B, 2] and absolute positions [B, W].

    Large values, the ones that win, come from small u = (bits + 1/2) * 2^-32, where float32 is dense: the
    tail is resolved to 2^-33. log1p keeps that resolution. The other end is clamped one step below u = 1.
    """
    uniform = ((random_bits(key, positions, vocab_size).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def apply_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Mask logits [B, T, V]: -inf for tokens less than min_p [B] times as probable as the top-1 token.

    Probabilities are softmax(logits / temperature [B]). Sequences at temperature 0 or with min_p 0 stay
    unchanged.
    """
    applies = ((min_p > 0) & (temperature > 0))[:, None, None]
    below = temperature * torch.where(min_p > 0, min_p, 1.0).log()  # at most 0
    min_logit = logits.amax(-1, keepdim=True) + below[:, None, None]
    return torch.where((logits < min_logit) & applies, float("-inf"), logits)


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits [B, T, V] outside top-k, then outside top-p of what remains, to -inf.

    temperature, top_k (0: off), top_p (1: off) are [B]. Probabilities are softmax(logits / temperature); the
    token that crosses top_p is kept, as are all tokens tied with the last one kept. Sequences at temperature
    0 stay unchanged. Backends have kernels that do the same without sorting.
    """
    V = logits.shape[-1]
    per_row = (-1, 1, 1)
    ordered = logits.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k, V).clamp(max=V).view(per_row)
    min_top_k_logit = ordered.gather(-1, (k - 1).expand(*logits.shape[:2], 1))
    safe_temperature = torch.where(temperature > 0, temperature, 1.0).view(per_row)
    below = torch.where(ordered >= min_top_k_logit, ordered, float("-inf")) - ordered[..., :1]  # at most 0
    # Integer masses, in units of 2^-32 of the top-1 token's: integer sums do not depend on their order, so
    # all devices cut at the same token. Logits divided by a tiny temperature would overflow.
    mass = ((below / safe_temperature).exp().double() * 2.0**32).long().cumsum(-1)
    min_mass = (mass[..., -1:].double() * top_p.view(per_row).double()).ceil().long()
    min_top_p_logit = ordered.gather(-1, (mass < min_mass).sum(-1, keepdim=True).clamp(max=V - 1))
    # top_p 1 keeps tokens of zero mass, too.
    min_top_p_logit = torch.where(top_p.view(per_row) < 1, min_top_p_logit, float("-inf"))
    below = (logits < min_top_k_logit) | (logits < min_top_p_logit)  # not NaN: `Step.draw` finds it
    return torch.where(below & (temperature > 0).view(per_row), float("-inf"), logits)
