"""The order in which questions are asked, and asking one."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from engine.text_decoder import TextDecoder
from evaluation.answers import Turn
from tokens.tokenizer import TooLong

Item = TypeVar("Item")


def rotated(items: list[Item], turn: int) -> list[Item]:
    """The same items in the same circle; another one begins at every turn."""
    first = turn % len(items)
    return items[first:] + items[:first]


def rounds(
    sets: dict[str, list[dict]], temperatures: list[float], methods: list[str]
) -> Iterator[tuple[str, dict, float, list[str]]]:
    """Yield (set, question, temperature, methods in the order of this round).

    The sets take turns, so that a run that is cut short has asked questions of all of them. In each set, and
    at each temperature, the method that begins changes from question to question.
    """
    for i in range(max(map(len, sets.values()))):
        for name, questions in sets.items():
            if i < len(questions):
                for temperature in temperatures:
                    yield name, questions[i], temperature, rotated(methods, i)


def ask(model: TextDecoder, question: dict, max_new_tokens: int, temperature: float, seed: int) -> list[Turn]:
    """Ask a question turn by turn, each with the model's own answers as history.

    The conversation ends before a turn that no longer fits; if the first one does not, the list is empty.
    """
    messages, turns = [], []
    for text in question["turns"]:
        messages.append({"role": "user", "content": text})
        try:
            ids = model.encode(messages)
        except TooLong:
            break
        if len(ids) >= model.decoder.max_seq_len:
            break
        result = model.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        messages.append({"role": "assistant", "content": result.text})
        turns.append(Turn(
            ids, result.ids, result.text, result.finish, result.prefill_seconds, result.seconds,
            result.accept_lengths,
        ))
    return turns
