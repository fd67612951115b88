"""Messages of conversations, made ready for chat templates.

Clients and files write the same message in several ways. Templates read one: a text as content, arguments of
calls as an object, thoughts under the names of `THOUGHTS`.
"""
from __future__ import annotations

import json
from collections.abc import Iterable

from common.errors import InputError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
ROLES = {"developer": "system", "function": "tool"}  # a newer and an older name: the one of templates


def _refuse(name: str):
    raise ValueError(f"{name} is no JSON")


JSON = json.JSONDecoder(parse_constant=_refuse, strict=False)  # texts may hold line ends


def ready(messages: Iterable[dict]) -> list[dict]:
    """Return messages as chat templates take them, without keys that are null.

    Raises InputError on content that is no text.
    """
    return [_ready({key: value for key, value in message.items() if value is not None})
            for message in messages]


def _ready(message: dict) -> dict:
    calls, role = message.get("tool_calls"), message.get("role")
    if isinstance(message.get("function_call"), dict):  # OpenAI's older form
        calls = calls or [{"type": "function", "function": message.pop("function_call")}]
    found = message | words_of(message.get("content", "")) | thoughts_of(message)
    found |= {"role": ROLES.get(role, role), "tool_calls": [*map(_with_arguments, calls or ())]}
    return found if calls else {key: value for key, value in found.items() if key != "tool_calls"}


def words_of(content: str | list) -> dict[str, str]:
    """Return the "content" of a message that may come in parts, and its thoughts if parts hold some.

    Raises InputError on a part that is no text.
    """
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("thinking", "reasoning"):
            thoughts.append(words_of(part.get("thinking", part.get("text")))["content"])
            continue
        text = part.get("text") if kind in ("text", "input_text", "output_text") else part
        if not isinstance(text, str):
            raise InputError(f"messages: {kind or text!r:.60} is no text; content has to be text")
        texts.append(text)
    return {"content": "".join(texts)} | thoughts_of({"reasoning": "".join(thoughts)})


def thoughts_of(message: dict) -> dict[str, str]:
    """Return the thoughts of a message under every name that templates read; nothing if it has none."""
    details = message.get("reasoning_details")  # of OpenRouter: a list of parts
    details = details if isinstance(details, list) else []
    parts = [part.get("text") for part in details if isinstance(part, dict)]
    given = (*map(message.get, THOUGHTS), "".join(text for text in parts if isinstance(text, str)))
    found = next((text for text in given if text and isinstance(text, str)), None)
    return dict.fromkeys(THOUGHTS, found) if found else {}


def arguments_of(given: object) -> object:
    """Return arguments of a call as an object if they are one, its JSON, or nothing; else unchanged."""
    found = given
    while isinstance(found, str):
        try:
            found = JSON.decode(found) if found.strip() else None
        except (ValueError, RecursionError):
            return given
    return {} if found in (None, []) else found if isinstance(found, dict) else given


def _with_arguments(call: object) -> object:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    return {**call, "arguments": arguments_of(call.get("arguments"))}
