"""Parse tool calls in a model's output. Formats:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>                     Qwen, Hermes
    <tool_call><function=f><parameter=p>text</parameter></function></tool_call>  Qwen3-Coder
    <tool_call>f<arg_key>p</arg_key><arg_value>text</arg_value></tool_call>      GLM
    [TOOL_CALLS][{"name": "f", "arguments": {...}}]                              Mistral
    <TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>                     Nemotron
    <|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>               Granite, Phi
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}                     DeepSeek
    {"name": "f", "parameters": {...}}; {...}                                    Llama 3, as the whole output

JSON may be a sequence of values, a list, or in a code fence. Reasoning, such as <think>...</think>, contains
no calls. At the start of an answer, a call of one of the request's tools is recognized even without tags:
small models often omit them.
"""
from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping

from common.errors import InputError
from tokens.messages import JSON, arguments_of
from tokens.stops import partial_match

FUNCTION = "<function="
_TAG_NAMES = "think", "thinking", "thought", "reasoning", "seed:think"
# [THINK] is Mistral's, ◁think▷ Kimi's.
REASONING_TAGS = {f"<{name}>": f"</{name}>" for name in _TAG_NAMES}
REASONING_TAGS |= {"[THINK]": "[/THINK]", "◁think▷": "◁/think▷"}
# <seed:tool_call>: Seed-OSS; otherwise like Qwen3-Coder.
OPENING_TAGS = ("<tool_call>", "<TOOLCALL>", "[TOOL_CALLS]", "<|tool_call|>", "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>", "<seed:tool_call>", FUNCTION)
# Schemas with one of these may have properties that `properties` does not list.
OPEN_SCHEMA_KEYS = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"}
UNTAGGED = ()  # format of calls without tags
TAGS = (*OPENING_TAGS, "</tool_call>", "</TOOLCALL>", "<|/tool_call|>", "[CALL_ID]", "[ARGS]",
        "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "</seed:tool_call>", "</function>",
        "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *REASONING_TAGS,
        *REASONING_TAGS.values())

# Newer Mistral models: [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}. Older DeepSeek models:
# function<｜tool▁sep｜>f and the arguments in a code fence.
_NEXT = re.compile(
    r"(?:[\s,;]|```(?:json)?|\[TOOL_CALLS\]|<｜tool▁calls?▁(?:begin|end)｜>)*"
    r"(?:(?=[{\[])|<function=(?P<tagged>[^<>]+)>|(?P<keyed>[\w.-]+)\s*(?=<arg_key>|(?P<ends></tool_call>))|"
    r"(?P<old>function<｜tool▁sep｜>)?(?P<named>[\w.-]+)"
    r"(?(old)\s*```json|\s*(?:(?:\[CALL_ID\]\w+)?\[ARGS\]|<｜tool▁sep｜>|(?={)))\s*)")
# A value may contain closing tags: it ends at a closing tag that another tag follows. If the model omits
# the closing tag, the value ends at the next tag.
_NO_PARAMETER = r"((?:(?!\n<parameter=).)*?)"
_PARAMETERS = [re.compile(rf"\s*<parameter=([^<>]+)>\n?{value}", re.DOTALL) for value in (
    rf"{_NO_PARAMETER}\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))",
    r"((?:(?!<tool_call>|<function=).)*?)\s*(?=<parameter=|</function>|</tool_call>)")]
_PARAMETERS += [re.compile(r"\s*<arg_key>([^<>]+)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>"
                           r"(?=\s*(?:<arg_key>|</tool_call>))", re.DOTALL)]
_OBJECT_START = re.compile(r"\s*(?={)")
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]]', re.DOTALL)  # a JSON string or bracket
_FUNCTION_END = re.compile(r"\s*(?:</function>|(?=</(?:seed:)?tool_call>))")
_CLOSING = re.compile(  # may have extra brackets
    r"[\s}\]`]*(?:</(?:seed:)?tool_call>|</TOOLCALL>|<\|/tool_call\|>|(?:<｜tool▁calls?▁end｜>\s*)+)|\s*```(?!\w)")
# Prefix of calls without tags: JSON, possibly in a list or code fence, whose first key is in _CALL_KEYS.
_UNTAGGED_PREFIX = re.compile(
    r"\s*(?:$|`{1,2}$|(?:```(?:json|jso|js|j)?\s*)?(?:$|\[?\s*(?:$|{\s*(?:$|(?P<key>\"[^\"]*\"?)))))")
_CALL_KEYS = '"name"', '"function"', '"type"', '"id"', '"arguments"', '"parameters"'
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_TAGS = re.compile(f"(?:{'|'.join(map(re.escape, TAGS))}|<(?:function|parameter)=[^<>]*>?)\\s*")
_LENIENT = json.JSONDecoder(strict=False)  # also accepts NaN and Infinity


def call_format(template: str | None) -> tuple[str, ...]:
    """Return the tags that open a call with this chat template; `UNTAGGED` if calls have none.

    Raises InputError if the template does not support tools, or its format is unknown.
    """
    template = template if template and "tools" in template else ""
    tags = tuple(tag for tag in OPENING_TAGS if tag in template)
    is_llama = '"parameters"' in template and ("ipython" in template or "python_tag" in template)
    if tags or is_llama:
        return tags or UNTAGGED
    raise InputError("tools: unknown tool call format in this model's chat template; known:"
                     " docs/serving.md#tools; leave tools out")


def shown_tags(control: Mapping[str, int]) -> list[int]:
    """Return the ids of control tokens to keep in text with tool calls. control: text -> id."""
    return [i for text, i in control.items() if _TAGS.fullmatch(text)]


def schema_of_calls(tools: Mapping[str, dict]) -> str:
    """Return the JSON schema of a call. tools: name -> schema of the parameters, {} if there are none."""
    def call(n: int, name: str, parameters: dict) -> dict:
        # `$ref` is relative to the root of the new schema.
        rebased = json.dumps(parameters).replace('"$ref": "#', f'"$ref": "#/anyOf/{n}/properties/arguments')
        # Otherwise small models invent arguments.
        closed = {} if OPEN_SCHEMA_KEYS & parameters.keys() else {"additionalProperties": False}
        arguments = {"type": "object", **closed} | json.loads(rebased)
        fields = {"name": {"const": name}, "arguments": arguments}
        return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}

    return json.dumps({"anyOf": [call(n, *tool) for n, tool in enumerate(tools.items())]})


class CallStream:
    """Separates tool calls from streamed text. Text is returned once it cannot be part of a call.

    call_tags: see `call_format`; None: no tools. tools: name -> schema of the parameters. prompt: the end of
    the prompt, which may open the reasoning.
    """

    def __init__(self, call_tags: tuple[str, ...] | None, tools: Mapping[str, dict] = {}, prompt: str = ""):
        self._call_tags, self._tools = call_tags, tools
        self._held, self._opening = "", ""  # held-back text, and the tag that opened it
        # The tag that ends the current reasoning, "" outside of it.
        self._close = next((end for tag, end in REASONING_TAGS.items() if prompt.rstrip().endswith(tag)), "")
        # A reasoning tag inside a line may be a quotation: until it is closed, calls are parsed.
        self._line, self._is_reasoning = "", True
        # The text so far may be calls without tags: they are at the start of the answer, after the reasoning.
        self._may_be_untagged = call_tags is not None

    def push(self, text: str) -> str:
        """Add text. Returns the text that cannot be part of a call."""
        self._held += text
        released = ""
        if self._check_untagged():
            return released
        while self._call_tags and not self._opening:
            tags = (self._close,) if self._close else tuple(REASONING_TAGS)
            tags += () if self._close and self._is_reasoning else self._call_tags
            if tag := re.search("|".join(map(re.escape, tags)), self._held):
                end = tag.start()
                if tag[0] in self._call_tags:
                    self._opening = tag[0]
                elif self._close:
                    self._close, end = "", tag.end()
                    self._may_be_untagged = True
                else:
                    before = (self._line + self._held[:end]).rpartition("\n")[2]
                    self._close, end = REASONING_TAGS[tag[0]], tag.end()
                    self._is_reasoning = not before.strip()
            else:
                end = len(self._held) - partial_match(self._held, tags)
            self._line = (self._line + self._held[:end]).rpartition("\n")[2]
            released, self._held = released + self._held[:end], self._held[end:]
            if not tag or self._check_untagged():
                break
        if self._call_tags is None:
            released, self._held = self._held, ""
        return released

    def _check_untagged(self) -> bool:
        """Return whether the held-back text may be calls without tags at the start of an answer."""
        if not self._may_be_untagged or not self._held or (self._close and self._call_tags != UNTAGGED):
            return False
        prefix = _UNTAGGED_PREFIX.match(self._held)
        key = prefix and prefix["key"]
        self._may_be_untagged = bool(prefix) and (not key or any(k.startswith(key) for k in _CALL_KEYS))
        if self._call_tags == UNTAGGED and not self._may_be_untagged:
            self._call_tags = None
        return self._may_be_untagged

    def reasoning(self) -> str:
        """Return "": reasoning between tags is part of the text."""
        return ""

    def finish(self) -> tuple[str, list[dict]]:
        """Return the remaining text and the calls."""
        rest, calls = "", []
        if self._check_untagged():
            found, broken, end = _read(self._held, 0, self._tools)
            after = self._held[end:].lstrip(" \r\n\t,;")
            are_known = all(call["function"]["name"] in self._tools for call in found)
            starts_with_call = not (broken and self._held.startswith(broken[0]))
            is_answer = self._call_tags == UNTAGGED and not broken and not after
            if found and starts_with_call and (are_known or is_answer):
                calls, self._held = found, "".join(broken) + after
            self._may_be_untagged = False
            rest = self.push("")
        while self._opening:
            if self._close and self._close in self._held:  # it was reasoning after all
                end = self._held.index(self._close) + len(self._close)
                rest += self._held[:end]
            else:
                start = 0 if self._opening == FUNCTION else len(self._opening)
                found, broken, end = _read(self._held, start, self._tools)
                if not found and not broken:  # the tag is quoted text
                    end = len(self._opening)
                rest += "".join(broken) if found else self._held[:end]
                calls += found
                self._line = ""
            self._held, self._opening, self._close = self._held[end:], "", ""
            rest += self.push("")
        rest += self._held
        return (rest.strip("\n") if calls else rest), calls


def _read(text: str, at: int, tools: Mapping[str, dict]) -> tuple[list[dict], list[str], int]:
    """Return the calls from index `at` on, the text of malformed ones, and the index where they end.

    An unterminated call extends to the end of the text: it may quote other calls.
    """
    calls: list[dict] = []
    broken: list[str] = []
    while found := _NEXT.match(text, at):
        if found["ends"] and found["keyed"] not in tools:  # other text between tags
            break
        begin = at
        try:
            if name := found["tagged"] or found["keyed"]:
                name = name.strip(" \n\"'")
                values, at = _tagged(text, found.end(), tools.get(name) or {})
            else:
                at = _end_of(text, found.end())
        except (ValueError, TypeError, RecursionError):  # TypeError: malformed schema
            return calls, [*broken, text[begin:]], len(text)
        try:
            values = values if name else _LENIENT.decode(text[found.end() : at])
            if name := name or found["named"]:
                values = {"name": name, "arguments": values}
            calls += [call_of(value, tools) for value in (values if isinstance(values, list) else [values])]
        except (ValueError, RecursionError):
            broken.append(text[begin:at])
    closing = _CLOSING.match(text, at)
    return calls, broken, closing.end() if (calls or broken) and closing else at


def _end_of(text: str, at: int) -> int:
    """Return the end of the object or list that starts at `at`. Raises ValueError if unterminated."""
    depth = 0
    for step in _JSON_TOKEN.finditer(text, at):
        depth += (step[0] in "{[") - (step[0] in "}]")
        if depth == 0:
            return step.end()
    raise ValueError("unterminated object")


def call_of(value: object, tools: Mapping[str, dict]) -> dict:
    """Return a parsed JSON value as a call in OpenAI's format. Raises ValueError if it is not a call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(name := value.get("name", value.get("function")), str):
        raise ValueError("not a tool call")
    # Arguments may be missing in calls of known tools.
    choices = [value[key] for key in ("arguments", "parameters") if key in value] or [None] * (name in tools)
    if not choices or not isinstance(arguments := arguments_of(choices[0]), dict):
        raise ValueError("not a tool call")
    json.dumps(value, ensure_ascii=False).encode()  # ValueError on a lone surrogate
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
    # Mistral's templates require ids of nine characters.
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def _tagged(text: str, at: int, schema: dict) -> tuple[dict, int]:
    """Return the arguments, between tags or in JSON, up to </function>, and the index after it.

    schema: that of the parameters. Raises ValueError if unterminated.
    """
    arguments: dict[str, object] = {}
    if start := _OBJECT_START.match(text, at):
        arguments, at = _LENIENT.raw_decode(text, start.end())
    properties = schema.get("properties")
    while found := next(filter(None, (pattern.match(text, at) for pattern in _PARAMETERS)), None):
        name, at = found[1].strip(" \n\"'"), found.end()
        property_schema = properties.get(name) if isinstance(properties, dict) else None
        arguments[name] = _value(found[2], _types(property_schema, schema))
    end = _FUNCTION_END.match(text, at)
    if not end:
        raise ValueError("unterminated function")
    return arguments, end.end()


def _value(text: str, types: set[str]) -> object:
    """Parse a text as a value of one of these JSON types. Returns the text if that fails."""
    for parse in (JSON.decode, ast.literal_eval) if types - {"string"} else ():
        try:
            value = JSON.decode(json.dumps(parse(text.strip())))  # no sets, only string keys
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, float) and value.is_integer() and "number" not in types:
            value = int(value)
        value_types = {_JSON_TYPES.get(type(value), "null"), "number" if type(value) is int else ""}
        if types & value_types - {"string"}:
            return value
    return text


def _types(schema: object, root: dict) -> set[str]:
    """Return the JSON types that a schema allows. root: `$ref` is relative to it. Both may be malformed."""
    types: set[object] = set()
    schemas, seen = [schema], set()
    while schemas:
        part = schemas.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        types.update(declared if isinstance(declared, list) else [declared])
        types |= {"null"} if part.get("nullable") is True else set()
        values = [*(part.get("enum") or []), *([part["const"]] if "const" in part else [])]
        types.update(_JSON_TYPES.get(type(value), "null") for value in values)
        schemas += [nested for key in ("anyOf", "oneOf", "allOf") for nested in part.get(key) or []]
        if "$ref" in part:
            target = root
            for key in str(part["$ref"]).removeprefix("#/").split("/"):
                target = target.get(key) if isinstance(target, dict) else None
            schemas.append(target)
    return types
