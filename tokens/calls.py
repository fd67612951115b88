"""Calls of functions in a model's text, in the forms that chat templates teach:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>                     Qwen, Hermes
    <tool_call><function=f><parameter=p>text</parameter></function></tool_call>  Qwen3-Coder
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]                              Mistral
    <TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>                     Nemotron
    {"name": "f", "parameters": {...}}; {...}                                    Llama 3, as the whole text

JSON values may follow one another or stand in a list. Thoughts, between <think> and </think>, hold no calls.
"""
from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping

from common.errors import InputError
from common.files import check_characters
from tokens.stops import begun

FUNCTION, THINKS, THOUGHT = "<function=", "<think>", "</think>"
OPENS = ("<tool_call>", "<TOOLCALL>", "[TOOL_CALLS]", FUNCTION)
BARE = ()  # the form of calls that nothing opens
# A text with tools shows these, also where they are control tokens.
TAGS = (*OPENS, "</tool_call>", "</TOOLCALL>", "[CALL_ID]", "[ARGS]", THINKS, THOUGHT)

_NEXT = re.compile(  # newer models of Mistral write [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}
    r"(?:[\s,;]|\[TOOL_CALLS\])*"
    r"(?:(?=[{\[])|<function=(?P<tagged>[^<>]+)>|(?P<named>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\])"
)
# A text may hold closing tags. The one that counts stands before the next opening or closing tag.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_OBJECT = re.compile(r"\s*(?={)")
_END = re.compile(r"\s*</function>")
_CLOSING = re.compile(r"\s*(</tool_call>|</TOOLCALL>)")
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _refuse(name: str):
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def form_of(template: str | None) -> tuple[str, ...]:
    """Return the tags that open a call for a model with this chat template, `BARE` if none does.

    Raises InputError if the template has no tools, or no known form of calls.
    """
    found = template if template and "tools" in template else ""
    tags = tuple(tag for tag in OPENS if tag in found)
    is_llama = '"parameters"' in found and ("ipython" in found or "python_tag" in found)
    if tags or is_llama:
        return tags or BARE
    raise InputError(
        "tools: this model's chat template defines no calls that are known here (those of Qwen, Llama 3,"
        " Mistral and Nemotron are); leave tools out"
    )


def schema_of_calls(tools: Mapping[str, dict]) -> str:
    """Return the JSON schema of a call. tools: name -> schema of the parameters, {} if there are none."""
    def call(n: int, name: str, parameters: dict) -> dict:
        # References count from the root.
        moved = json.dumps(parameters).replace('"$ref": "#', f'"$ref": "#/anyOf/{n}/properties/arguments')
        arguments = {"type": "object"} | (json.loads(moved) or {"additionalProperties": False})
        parts = {"name": {"const": name}, "arguments": arguments}
        return {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}

    return json.dumps({"anyOf": [call(n, *tool) for n, tool in enumerate(tools.items())]})


def arguments_of(given: object) -> object:
    """Return arguments of a call as an object if they are one, its JSON, or nothing; else unchanged."""
    found = given
    if isinstance(given, str):
        try:
            found = _JSON.decode(given) if given.strip() else None
        except (ValueError, RecursionError):
            return given
    return {} if found is None else found if isinstance(found, dict) else given


class CallStream:
    """Text in; out what certainly belongs to no call, as early as possible. The calls are known at the end.

    form: see `form_of`; None: there are no calls. tools: name -> schema of the parameters. thinks: the prompt
    ends in an open thought.
    """

    def __init__(self, form: tuple[str, ...] | None, tools: Mapping[str, dict] = {}, thinks: bool = False):
        self._form, self._tools, self._thinks = form, tools, thinks
        self._held, self._opening = "", ""  # the tag that began what is held

    def push(self, text: str) -> str:
        """Return the text that certainly belongs to no call."""
        self._held += text
        if self._form == BARE and self._held.strip() and self._held.lstrip()[0] not in "{[":
            self._form = None
        certain = ""
        while self._form and not self._opening:
            tags = (THOUGHT,) if self._thinks else (*self._form, THINKS)
            if found := re.search("|".join(map(re.escape, tags)), self._held):
                is_thought = found[0] in (THINKS, THOUGHT)
                self._opening, at = ("", found.end()) if is_thought else (found[0], found.start())
                self._thinks ^= is_thought
            else:
                at = len(self._held) - begun(self._held, tags)
            certain, self._held = certain + self._held[:at], self._held[at:]
            if not found:
                break
        if self._form is None:
            certain, self._held = self._held, ""
        return certain

    def finish(self) -> tuple[str, list[dict]]:
        """Return the rest of the text, and the calls."""
        if self._form == BARE:
            calls, end = _read(self._held, 0, self._tools)
            is_all = calls and not self._held[end:].strip(" \r\n\t,;")
            return ("", calls) if is_all else (self._held, [])
        rest, calls = "", []
        while self._opening:
            begin = 0 if self._opening == FUNCTION else len(self._opening)
            found, end = _read(self._held, begin, self._tools)
            if found is None:  # from a call that is broken on all is text: it may quote others
                break
            if not found:  # the tag is a word of the text
                end = len(self._opening)
                rest += self._opening
            calls += found
            self._held, self._opening = self._held[end:], ""
            rest += self.push("")
        rest += self._held
        return (rest.strip("\n") if calls else rest), calls


def _read(text: str, at: int, tools: Mapping[str, dict]) -> tuple[list[dict] | None, int]:
    """Return the calls that follow in a text, and where they end. None instead of calls: one is broken."""
    calls: list[dict] = []
    try:
        while found := _NEXT.match(text, at):
            if name := found["tagged"]:
                values, at = _tagged(text, found.end(), tools.get(name.strip()) or {})
            else:
                values, at = _JSON.raw_decode(text, found.end())
            if name := name or found["named"]:
                values = {"name": name.strip(), "arguments": values}
            calls += [_call(value, tools) for value in (values if isinstance(values, list) else [values])]
    except (ValueError, TypeError, RecursionError, InputError):  # TypeError: of a schema that is damaged
        return None, at
    closing = _CLOSING.match(text, at)
    return calls, closing.end() if calls and closing else at


def _call(found: object, tools: Mapping[str, dict]) -> dict:
    """Return a call as OpenAI has it. Raises ValueError or InputError if this is none."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        raise ValueError("no call")
    given = [found[key] for key in ("arguments", "parameters") if key in found] or [None] * (name in tools)
    if not given or not isinstance(arguments := arguments_of(given[0]), dict):
        raise ValueError("no call")
    check_characters(found, "a call")
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
    # The templates of Mistral take ids of nine characters only.
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _tagged(text: str, at: int, schema: dict) -> tuple[dict, int]:
    """Return the arguments between tags, or in JSON, up to </function>, and where that ends.

    schema: of the parameters. Raises ValueError if they do not end.
    """
    arguments: dict[str, object] = {}
    if begin := _OBJECT.match(text, at):
        arguments, at = _JSON.raw_decode(text, begin.end())
    properties = schema.get("properties")
    while found := _PARAMETER.match(text, at):
        name, at = found[1].strip(), found.end()
        own = properties.get(name) if isinstance(properties, dict) else None
        arguments[name] = _value(found[2], _types(own, schema))
    end = _END.match(text, at)
    if not end:
        raise ValueError("a function without an end")
    return arguments, end.end()


def _value(text: str, types: set[str]) -> object:
    """Return the value of one of these JSON types that a text stands for; the text if there is none."""
    for read in (_JSON.decode, ast.literal_eval) if types - {"string"} else ():
        try:
            value = _JSON.decode(json.dumps(read(text.strip())))  # no sets, no keys but texts
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            value = int(value)
        kinds = {_KINDS.get(type(value), "null"), "number" if type(value) is int else ""}
        if types & kinds - {"string"}:
            return value
    return text


def _types(schema: object, root: dict) -> set[str]:
    """Return the JSON types that a schema names, itself or by reference into `root`. It may be damaged."""
    types: set[object] = set()
    parts, seen = [schema], set()
    while parts:
        part = parts.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        types.update(named if isinstance(named, list) else [named], ["null"] * (part.get("nullable") is True))
        values = [*(part.get("enum") or []), *([part["const"]] if "const" in part else [])]
        types.update(_KINDS.get(type(value), "null") for value in values)
        parts += [own for key in ("anyOf", "oneOf", "allOf") for own in part.get(key) or []]
        if "$ref" in part:
            found = root
            for step in str(part["$ref"]).removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, dict) else None
            parts.append(found)
    return types
