"""Messages as clients and files write them, and as chat templates take them."""
import json

import pytest
from helpers.tokenizers import with_template

from server.protocol import ChatBody
from tokens.messages import THOUGHTS, arguments_of, ready

WHY = dict.fromkeys(THOUGHTS, "why")
EMPTY = {"role": "assistant", "content": ""}


def call(arguments, **more) -> dict:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def texts(*parts: str) -> list[dict]:
    return [{"type": "text", "text": part} for part in parts]


READY = {
    "call, no content": ({"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}', id="c")]},
                         {**EMPTY, "tool_calls": [call({"x": 1}, id="c")]}),
    "content absent": ({"role": "assistant", "thinking": "why", "tool_calls": [call(" ")]},
                       {**EMPTY, **WHY, "tool_calls": [call({})]}),
    "bare call": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]},
                  {**EMPTY, "tool_calls": [{"name": "f", "arguments": {}}]}),
    "older call": ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
                   {**EMPTY, "tool_calls": [call({})]}),
    "older result": ({"role": "function", "name": "f", "content": "7"},
                     {"role": "tool", "name": "f", "content": "7"}),
    "parts": ({"role": "developer", "content": texts("a", "b"), "tool_calls": []},
              {"role": "system", "content": "ab"}),
    "thoughts in parts": (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": texts("why")}, *texts("a")]},
        {"role": "assistant", "content": "a", **WHY}),
    "other fields": ({"role": "assistant", "content": "x", "reasoning": "why", "mood": "!", "refusal": None},
                     {"role": "assistant", "content": "x", **WHY, "mood": "!"}),
    "no thoughts": ({**EMPTY, "thinking": "", "reasoning": [1]}, {**EMPTY, "thinking": "", "reasoning": [1]}),
    "OpenRouter": ({"role": "assistant", "content": "x", "reasoning_details": texts("wh", "y")},
                   {"role": "assistant", "content": "x", **WHY, "reasoning_details": texts("wh", "y")}),
}


@pytest.mark.parametrize("name", READY)
def test_messages_as_templates_take_them(name):
    message, want = READY[name]
    before = json.dumps(message)
    assert ready([message]) == [want] == ready([want])
    assert json.dumps(message) == before  # a caller's messages stay his


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
CHAT = [
    {"role": "user", "content": texts("time", "?")},
    {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call([], id="c")]},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"}, {"role": "assistant", "content": "noon"},
]


def test_every_way_to_the_template_makes_messages_ready(bpe, tmp_path):
    """From Python and over HTTP."""
    tok = with_template(bpe, tmp_path, TEMPLATE)
    for ids in (tok.chat(CHAT), tok.chat(ChatBody(messages=CHAT).dicts)):
        assert tok.decode(ids) == "user:time?;assistant:why{};tool:12:00;assistant:noon;"


@pytest.mark.parametrize("given, found", (
    (" \n", {}), ("null", {}), ("[]", {}), ('"{\\"a\\": 1}"', {"a": 1}), ('{"a": "x\ny"}', {"a": "x\ny"}),
    ("broken", "broken"), ("[1]", "[1]"), ('{"a": NaN}', '{"a": NaN}'),
), ids=str)
def test_arguments_are_an_object_where_they_can_be(given, found):
    assert arguments_of(given) == found
