"""Calls of functions: what a conversation says of them, and what a model writes.

Which form a model was taught shows in its chat template. Qwen and others write
<tool_call>{"name": ..., "arguments": {...}}</tool_call>, Llama 3 writes {"name": ..., "parameters": {...}}.
"""
from __future__ import annotations

import json
import uuid
from typing import NamedTuple

from common.errors import InputError
from server.schemas import Message

TAGGED, BARE = "tagged", "bare"
OPENS, CLOSES = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """A call that a model made; its arguments are JSON."""

    id: str
    name: str
    arguments: str


def form_of(template: str | None) -> str:
    """How a model with this chat template writes calls. Raises InputError if the template defines none."""
    if template and "tools" in template:
        if OPENS in template:
            return TAGGED
        if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
            return BARE
    raise InputError(
        "tools: this model's chat template defines no calls that are known here (those of Qwen and of Llama 3"
        " are); leave tools out"
    )


def as_dict(message: Message) -> dict:
    """A message as chat templates take it. Raises InputError on content that is no text."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise InputError(f"messages: content of type {part.type!r} is not understood, only text is")
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    found = {"role": role, "content": content or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": _parsed(call.function.arguments)}}
            for call in message.tool_calls
        ]
    return found


def _parsed(arguments: str | dict) -> object:
    """Arguments as templates want them: as values, if they can be read."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


class CallStream:
    """Text in; out what is no call, as early as that is certain. At the end the calls are known.

    form: see `form_of`; None: there are no calls, and all is text.
    """

    def __init__(self, form: str | None):
        self._form, self._held, self._said = form, "", False

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a call."""
        if self._form is None:
            return text
        self._held += text
        if self._form == BARE:
            beginning = self._held.lstrip()
            if not self._said and (not beginning or beginning[0] == "{"):
                return ""
            certain, self._held, self._said = self._held, "", True
            return certain
        at = self._held.find(OPENS)
        if at < 0:
            at = next(
                (len(self._held) - n for n in range(min(len(OPENS), len(self._held)), 0, -1)
                 if OPENS.startswith(self._held[-n:])), len(self._held),
            )
        certain, self._held = self._held[:at], self._held[at:]
        return certain

    def finish(self) -> tuple[str, list[Call]]:
        """The text that was held back for nothing, and the calls."""
        held, self._held = self._held, ""
        if self._form == BARE:
            call = _call(held, "parameters")
            return ("", [call]) if call else (held, [])
        rest, calls = "", []
        while held:
            before, opens, after = held.partition(OPENS)
            inner, closes, held = after.partition(CLOSES)
            call = _call(inner, "arguments") if opens else None
            rest += before if call or not opens else before + opens + inner + closes
            calls += [call] if call else []
        return (rest.strip("\n") if calls else rest), calls


def _call(text: str, key: str) -> Call | None:
    """A call as a model writes it, None if it is none."""
    try:
        found = json.loads(text.strip())
        name, arguments = found["name"], found[key]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False))
