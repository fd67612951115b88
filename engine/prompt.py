"""Prompts as callers give them, and as token ids that fit."""
from __future__ import annotations

from common.errors import InputError
from common.schema import Wrong
from tokens.tokenizer import Tokenizer, TooLong

Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages

FORMS = 'a text, token ids, or a list with messages such as {"role": "user", "content": "Hello!"}'


def is_prompt(prompt: object) -> bool:
    """Return whether this is a text, a list of token ids, or one of messages."""
    if isinstance(prompt, str):
        return prompt != ""
    return isinstance(prompt, list) and (all(type(i) is int for i in prompt) or all(map(is_message, prompt)))


def is_message(message: object) -> bool:
    """Return whether this is a dictionary with a role, and content of a type that templates take."""
    return (isinstance(message, dict) and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | list | None))


def encode(
    tokenizer: Tokenizer | None, prompt: Prompt, *, raw: bool = False, system: str | None = None,
    room: tuple[int, int] | None = None, name: str = "the prompt", variables: dict | None = None,
    parse_special: bool = True,
) -> list[int]:
    """Turn a prompt into token ids.

    Chat messages and (unless `raw`) text go through the chat template, with `variables`; ids stay
    unchanged. In text that does not, control tokens spelled out count as such, unless `parse_special` is
    false. Raises Wrong for a prompt of another type; InputError for text without a tokenizer, or a system
    message without a chat template; TooLong, with the numbers and without the work, if it certainly does not
    fit. room: tokens of the cache, and of the model at most. name: what to call the prompt then.
    """
    if not is_prompt(prompt):
        raise Wrong("prompt", prompt, FORMS)
    for key, value, kind in ("system", system, str), ("variables", variables, dict):
        if not isinstance(value, kind | None):
            raise Wrong(key, value, f"a {kind.__name__}")
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        if system is not None:
            raise InputError("a system message (--system) needs a text or messages, not token ids")
        return prompt
    if tokenizer is None:
        raise InputError("this checkpoint has no tokenizer: give token ids (--prompt-ids)")
    plain, most = raw or not tokenizer.has_template, None if room is None else room[0] - 1
    if system is not None and plain:
        raise InputError(
            "a system message (--system) needs the chat template, which is left out by --raw or missing here"
        )
    try:
        if isinstance(prompt, str) and plain:
            return tokenizer.encode(prompt, parse_special=parse_special, at_most=most)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None:
            turns = [{"role": "system", "content": system}, *turns]
        return tokenizer.chat(turns, at_most=most, **(variables or {}))
    except TooLong as e:
        raise too_long(name, e, *room) from None


def too_long(name: str, what: object, size: int, longest: int) -> TooLong:
    """Return the error of a prompt that does not fit in a cache. longest: the model's maximum."""
    more = ", the model's maximum: shorten it"
    if size < longest:
        more = f": shorten it or raise --max-seq-len (at most {longest:,})"
    return TooLong(f"{name} {what} and needs room for one more, the cache holds {size:,}{more}")


def check_prompt(prompt: list[int], name: str, room: tuple[int, int], vocab_size: int) -> None:
    """Raise ValueError, with the numbers, if a prompt is empty, does not fit (see `encode`), or has an id
    outside the vocabulary.
    """
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    if len(prompt) >= room[0]:
        raise too_long(name, f"has {len(prompt):,} tokens", *room)
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, the vocabulary is 0..{vocab_size - 1}")
