"""Normalize chat messages for chat templates.

Clients and files have several formats. Templates get one: content is a string, or null with tool calls;
arguments of tool calls are `Arguments`; reasoning has all names of `REASONING_KEYS`.
"""
from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable

from common.errors import InputError
from common.schema import ABSENT, InvalidValue

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TEXT_KEYS = {  # type of a content part -> key of its text
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
ROLES = {"developer": "system", "function": "tool"}  # other names -> those of templates


def _reject_constant(name: str):
    raise ValueError(f"{name} is not JSON")


CONTINUE, GENERATION = "continue_final_message", "add_generation_prompt"
# The space at its end detects templates that trim messages.
END_MARKER = "\ue000end of the message\ue001 "
JSON = json.JSONDecoder(parse_constant=_reject_constant, strict=False)  # accept line breaks in strings


class Arguments(dict):
    """Arguments of a tool call: a dictionary that works as its JSON string where templates expect one."""

    def __init__(self, arguments: dict, text: str):
        super().__init__(arguments)
        self._text = text

    def changed(self, change: Callable) -> Arguments:
        """Apply a change to dictionary and string."""
        return Arguments(change(dict(self)), change(self._text))

    def __str__(self) -> str:
        return self._text

    def __getitem__(self, key: object):
        return self._text[key] if isinstance(key, (int, slice)) else super().__getitem__(key)

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text

    def __getattr__(self, name: str):
        if name in self or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._text, name)


def normalize_chat(messages: Iterable[dict], variables: dict) -> tuple[list[dict], dict]:
    """Return normalized messages and template variables. Raises InputError if they contradict each other."""
    messages = [*messages]
    last = messages[-1] if messages else {}
    prefix = last.get("prefix") is True
    continues = variables.get(CONTINUE, prefix)
    if prefix and (not continues or last.get("role") != "assistant"):
        raise InputError(f"prefix: needs a last message of the assistant, and contradicts {CONTINUE}: false")
    if continues:
        if variables.get(GENERATION):
            raise InputError(f"{CONTINUE} and {GENERATION}: cannot both be true; set one of them")
        variables = {**variables, CONTINUE: continues, GENERATION: False}
        if messages:
            messages[-1] = {key: value for key, value in last.items() if key != "prefix"}
    return normalize(messages), variables


def render(template, context: dict, messages: list[dict]) -> str:
    """Render a jinja template. The last message may be left open, to be continued.

    Null content becomes "" if the template fails on it or prints None.
    """
    if not (field := context.pop(CONTINUE, False)):
        return _render(template, context, messages)
    field = field if isinstance(field, str) else "content"
    text = messages[-1].get(field) if messages else None
    if not isinstance(text, str):
        raise InputError(f"{CONTINUE}: the last message has no {field}")
    marked = dict.fromkeys(REASONING_KEYS if field in REASONING_KEYS else [field], text + END_MARKER)
    rendered = _render(template, context, [*messages[:-1], messages[-1] | marked])
    if (end := rendered.rfind(END_MARKER.rstrip())) < 0 or text.strip() not in rendered:
        raise InputError(f"{CONTINUE}: this chat template changes the last message")
    # If the marker has lost its space, the template trims messages.
    return rendered[:end] if rendered.startswith(END_MARKER, end) else rendered[:end].rstrip()


def _render(template, context: dict, messages: list[dict]) -> str:
    def render_all(messages: list[dict]) -> str:
        return template.render({**context, "messages": messages})

    filled = [{**m, "content": ""} if m.get("content", "") is None else m for m in messages]
    try:
        rendered = render_all(messages)
    except Exception:  # a template can raise anything
        if filled == messages:
            raise
        return render_all(filled)
    if filled != messages:
        with contextlib.suppress(Exception):
            return min(rendered, render_all(filled), key=lambda text: text.count("None"))
    return rendered


def normalize(messages: Iterable[dict]) -> list[dict]:
    """Return messages in the format of templates. Null values are removed, except content next to tool calls.

    Raises InputError on content that is missing or not text.
    """
    return [_normalize({key: value for key, value in message.items() if value is not None}, i)
            for i, message in enumerate(messages)]


def _normalize(message: dict, index: int) -> dict:
    calls, role, reasoning = message.get("tool_calls"), message.get("role"), reasoning_of(message)
    if message.get("images"):  # Ollama's format
        raise InputError("messages: 'images' is not text; only text is supported")
    if isinstance(message.get("function_call"), dict):  # OpenAI's deprecated format
        calls = calls or [{"type": "function", "function": message.pop("function_call")}]
    content = message.get("content", message.get("refusal"))
    if content is None and not (calls or reasoning):
        raise InvalidValue(f"messages.{index}.content", ABSENT, "a text or tool_calls")
    text = {"content": None} if content is None and calls else content_of(content or "")
    normalized = message | text | reasoning
    normalized |= {"role": ROLES.get(role, role), "tool_calls": [*map(_with_arguments, calls or ())]}
    return normalized if calls else {key: value for key, value in normalized.items() if key != "tool_calls"}


def content_of(content: str | list) -> dict[str, str]:
    """Return content, which may be in parts, as {"content": ...}, with the reasoning of its parts if any.

    Raises InputError on a part that is not text.
    """
    texts, reasoning = [], []
    for part in content if isinstance(content, list) else [content]:
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type in ("thinking", "reasoning"):
            reasoning.append(content_of(part.get("thinking", part.get("text")))["content"])
            continue
        text = part.get(TEXT_KEYS[part_type]) if part_type in TEXT_KEYS else part
        if not isinstance(text, str):
            raise InputError(f"messages: {part_type or text!r:.60} is not text; only text is supported")
        texts.append(text)
    return {"content": "".join(texts)} | reasoning_of({"reasoning": "".join(reasoning)})


def reasoning_of(message: dict) -> dict[str, str]:
    """Return the reasoning of a message under all names that templates read; {} if it has none."""
    details = message.get("reasoning_details")  # OpenRouter's: a list of parts
    details = details if isinstance(details, list) else []
    parts = [part.get("text") for part in details if isinstance(part, dict)]
    candidates = (*map(message.get, REASONING_KEYS), "".join(text for text in parts if isinstance(text, str)))
    reasoning = next((text for text in candidates if text and isinstance(text, str)), None)
    return dict.fromkeys(REASONING_KEYS, reasoning) if reasoning else {}


def arguments_of(value: object) -> object:
    """Return tool call arguments (a dictionary, JSON or empty) as `Arguments`; anything else unchanged."""
    parsed = value
    while isinstance(parsed, str):
        try:
            parsed = JSON.decode(parsed) if parsed.strip() else None
        except (ValueError, RecursionError):
            return value
    parsed = {} if parsed in (None, []) else parsed
    if not isinstance(parsed, dict):
        return value
    is_text = isinstance(value, str) and value.strip() and JSON.decode(value) == parsed
    return Arguments(parsed, value if is_text else json.dumps(parsed, ensure_ascii=False))


def _with_arguments(call: object) -> object:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    return {**call, "arguments": arguments_of(call.get("arguments"))}
