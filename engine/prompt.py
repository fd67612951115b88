"""Prompts as callers give them, and as token ids that fit."""
from __future__ import annotations

from common.errors import InputError
from common.schema import InvalidValue
from tokens.tokenizer import PromptTooLong, Tokenizer

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
    max_lengths: tuple[int, int] | None = None, name: str = "the prompt", variables: dict | None = None,
    parse_special: bool = True,
) -> list[int]:
    """Turn a prompt into token ids.

    Chat messages and (unless `raw`) text go through the chat template, with `variables`; ids stay unchanged.
    parse_special: encode special tokens in raw text as such. max_lengths: of the cache, and the model.
    name: of the prompt, for errors. Raises InvalidValue for a prompt of another type; InputError for text
    without a tokenizer, or a system message without a chat template; PromptTooLong, before the work, if it
    certainly does not fit.
    """
    if not is_prompt(prompt):
        raise InvalidValue("prompt", prompt, FORMS)
    for key, value, kind in ("system", system, str), ("variables", variables, dict):
        if not isinstance(value, kind | None):
            raise InvalidValue(key, value, f"a {kind.__name__}")
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        if system is not None:
            raise InputError("a system message (--system) needs a text or messages, not token ids")
        return prompt
    if tokenizer is None:
        raise InputError("this checkpoint has no tokenizer: give token ids (--prompt-ids)")
    plain, most = raw or not tokenizer.has_template, None if max_lengths is None else max_lengths[0] - 1
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
    except PromptTooLong as e:
        raise too_long(name, e, *max_lengths) from None


def too_long(name: str, what: object, size: int, longest: int) -> PromptTooLong:
    """Return the error of a prompt that does not fit in a cache. longest: the model's maximum."""
    more = ", the model's maximum: shorten it"
    if size < longest:
        more = f": shorten it or raise --max-seq-len (at most {longest:,})"
    return PromptTooLong(f"{name} {what} and needs one for the answer, the context length is {size:,}{more}")


def check_prompt(prompt: list[int], name: str, max_lengths: tuple[int, int], vocab_size: int) -> None:
    """Raise ValueError, with the numbers, if a prompt is empty, does not fit (see `encode`), or has an id
    outside the vocabulary.
    """
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    if len(prompt) >= max_lengths[0]:
        raise too_long(name, f"has {len(prompt):,} tokens", *max_lengths)
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, the vocabulary is 0..{vocab_size - 1}")
