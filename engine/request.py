"""Requests: prompts, their encoding as token ids, and the engine's outputs."""
from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple, Protocol

from common.errors import InputError
from common.schema import InvalidValue
from engine.sampling import Sampling
from tokens.tokenizer import PromptTooLong, TextStream, Tokenizer

Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages

MAX_CHARACTERS_PER_TOKEN = 128  # upper bound on the mean over a prompt
IS_EMPTY = "is empty: pass text, token ids or messages"
PROMPT_FORMS = 'text, token ids, or a list of messages such as {"role": "user", "content": "Hello!"}'
# "stop": a stop id, which is the last of the ids, or a stop string. "length": max_new_tokens. "cache": the
# cache is full. "error": see `Request.error`.
Finish = Literal["stop", "length", "cache", "error"]


class Guide(Protocol):
    """A grammar matcher that follows one output, such as `tokens.grammar.Guide`."""

    error: str | None  # why the output cannot follow the grammar

    def advance(self, ids: list[int]) -> None:
        """Advance the matcher by emitted ids."""

    def mask(self, tokens: list[int], parent: list[int], into) -> None:
        """Fill the numpy array `into` [T, words] int32: one bit for each token id that may follow a node."""


class Score(NamedTuple):
    """Log-probability of a token under the target, and the top tokens with theirs, most probable first."""

    logprob: float
    top: list[tuple[int, float]]


class Draft(NamedTuple):
    """The tree of one step, root first, and the path through it that was accepted.

    scores: the drafter's cumulative log-probability of each node, None if it has none.
    """

    tokens: list[int]
    parent: list[int]
    path: list[int]
    scores: list[float] | None


class Event(NamedTuple):
    """The tokens that a request gained in one pass, and the text that they complete.

    The first `drafted` of `ids` were drafted. nodes: drafted nodes of the step's tree. The last event of a
    request has a `finish`.
    """

    request: Request
    ids: list[int]
    text: str
    drafted: int
    scores: list[Score]
    nodes: int
    draft: Draft | None
    finish: Finish | None


@dataclass(eq=False, repr=False)
class Request:
    """A sequence in the engine, from `Engine.admit` on.

    watch: its events carry the drafted trees. plain: decode it without drafts. prompt_scores: a `Score` of
    each prompt token but the first, if asked for. accept_lengths: tokens emitted by each step; their mean is
    the acceptance length τ. trees: steps by tree, "T/D/k", "N nodes" of a static one, or "plain". step_times:
    seconds of each step, "plain" (nothing drafted, head not run) or "drafted".
    """

    prompt: list[int]
    sampling: Sampling
    guide: Guide | None = None
    stream: TextStream | None = None
    watch: bool = False
    plain: bool = False
    prompt_scores: list[Score] | None = None
    # Results so far.
    ids: list[int] = field(default_factory=list)
    text: str = ""
    scores: list[Score] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    trees: Counter[str] = field(default_factory=Counter)
    step_times: dict[str, list[float]] = field(default_factory=lambda: {"plain": [], "drafted": []})
    finish: Finish | None = None
    error: str | None = None  # why it cannot go on
    stop: str | int | None = None  # the stop string, or id of `stop_token_ids`, that ended it
    cached: int = 0  # prompt tokens reused from the prefix cache
    # `time.perf_counter` at admission, at the first token and at the last one.
    admitted_at: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    # Bookkeeping of the engine.
    slot: int = -1  # batch slot; -1: none
    prefilled: int = 0  # prompt tokens in the caches
    acceptance: object = None  # the scheduler's statistics of this request
    active: bool = True  # it holds a batch slot
    undelivered: deque[Event] = field(default_factory=deque)  # events that `Engine.run` has not yielded yet

    def __repr__(self) -> str:
        return f"Request({len(self.ids)} tokens, finish={self.finish!r}, text={self.text[:60]!r})"

    @property
    def length(self) -> int:
        """Number of committed tokens (before the root) that the host has read; the device may be ahead."""
        return len(self.prompt) + len(self.ids) - 1

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.ids

    @property
    def prefill_seconds(self) -> float:
        """Seconds from admission to the first token."""
        return (self.first or time.perf_counter()) - self.admitted_at

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last one."""
        return self.last - self.first if self.first else 0.0

    @property
    def step_seconds(self) -> dict[str, float]:
        """Mean seconds of a step, by "plain" and "drafted", from one step's output to the next one's."""
        return {kind: fmean(seconds) for kind, seconds in self.step_times.items() if seconds}

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens per step, 1 for plain decoding, 0 without a step."""
        return fmean(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one / `seconds`; 0 without any."""
        return (len(self.ids) - 1) / self.seconds if self.seconds > 0 and len(self.ids) > 1 else 0.0

    def emit(self, ids: list[int], scores: list[Score]) -> tuple[str, int]:
        """Append emitted tokens. Returns the text they complete, and the number of tokens kept: a stop string
        may end the output before the last one.
        """
        text, count = "", len(ids)
        if self.stream:
            text, count, self.stop = self.stream.emit(ids)
        self.ids += ids[:count]
        self.scores += scores[:count]
        self.text += text
        return text, count

    def flush(self) -> str:
        """Append and return the text still held back (for UTF-8 or stop strings) at the end of the output."""
        rest = self.stream.flush() if self.stream and self.stop is None else ""
        self.text += rest
        return rest


# -- prompts ------------------------------------------------------------------------------------------------


def is_prompt(prompt: object) -> bool:
    """Return whether this is a string, a list of token ids, or a list of messages."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and (
        all(type(i) is int for i in prompt) or all(map(is_message, prompt))))


def is_message(message: object) -> bool:
    """Return whether this is a dictionary with a role, and content of a type that chat templates accept."""
    return (isinstance(message, dict) and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | list | None))


def encode(
    tokenizer: Tokenizer | None, prompt: Prompt, *, raw: bool = False, system: str | None = None,
    max_lengths: tuple[int, int] | None = None, name: str = "the prompt", variables: dict | None = None,
    parse_special: bool = True,
) -> list[int]:
    """Turn a prompt into token ids.

    Chat messages and (unless `raw`) text go through the chat template, with `variables`; ids stay unchanged.
    parse_special: encode special tokens in raw text as such. max_lengths: maximum sequence length of the KV
    cache and of the model. name: the prompt's name in errors. Raises InputError for an empty prompt or one of
    another type, text without a tokenizer, or a system message without a chat template; PromptTooLong, before
    encoding, if it has more characters than can fit.
    """
    if prompt in ("", []):
        raise InputError(f"{name} {IS_EMPTY}")
    if not is_prompt(prompt):
        raise InvalidValue("prompt", prompt, PROMPT_FORMS)
    for key, value, kind in ("system", system, str), ("variables", variables, dict):
        if not isinstance(value, kind | None):
            raise InvalidValue(key, value, f"a {kind.__name__}")
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        if system is not None:
            raise InputError("a system message (--system) needs text or messages, not token ids")
        return prompt
    if tokenizer is None:
        raise InputError("this checkpoint has no tokenizer: pass token ids (--prompt-ids)")
    no_template, messages = raw or not tokenizer.has_template, prompt
    if max_lengths and (size := len(str(prompt))) > MAX_CHARACTERS_PER_TOKEN * max_lengths[0]:
        raise too_long(name, f"has {size:,} characters", *max_lengths)
    if system is not None and no_template:
        raise InputError(
            "a system message (--system) needs a chat template: leave out --raw, or use a model that has one"
        )
    if isinstance(prompt, str):
        if no_template:
            return tokenizer.encode(prompt, parse_special=parse_special)
        messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.chat(messages, **(variables or {}))


def too_long(name: str, what: str, cache_length: int, model_length: int) -> PromptTooLong:
    """Return the error for a prompt that does not fit. The lengths are the maxima of cache and model."""
    advice = ", the model's maximum: shorten it"
    if cache_length < model_length:
        advice = f": shorten it or raise --max-seq-len (at most {model_length:,})"
    return PromptTooLong(
        f"{name} {what}; prompt and output together can have at most {cache_length:,} tokens{advice}")


def check_prompt(prompt: list[int], name: str, max_lengths: tuple[int, int], vocab_size: int) -> None:
    """Raise InputError if a prompt is empty, too long, or has an id outside the vocabulary. See `encode`."""
    if not prompt:
        raise InputError(f"{name} {IS_EMPTY}")
    if len(prompt) >= max_lengths[0]:
        raise too_long(name, f"has {len(prompt):,} tokens", *max_lengths)
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise InputError(f"{name} holds token id {token}, the vocabulary is 0..{vocab_size - 1}")
