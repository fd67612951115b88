"""Calls of functions in what models write, and in conversations."""
import json

import pytest

from common.errors import InputError
from server.schemas import Message
from server.tools import BARE, TAGGED, CallStream, as_dict, form_of

QWEN = "{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}{{ messages }}"
LLAMA = '{% if tools %}{"name": x, "parameters": y} ipython{% endif %}{{ messages }}'


def read(form, text: str, size: int):
    """What a stream gives of a text in pieces: what came before its end, the rest, the calls."""
    stream = CallStream(form)
    early = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    return early, *stream.finish()


@pytest.mark.parametrize("size", (1, 3, 1000))
def test_tagged_calls(size):
    text = (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    early, rest, calls = read(TAGGED, text, size)
    assert early == "Let me see.\n" and rest == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": "é<"}), ("g", {})]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("text", (
    "no call, a < b", "almost <tool_cal", '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "<tool_call>broken", "",
))
def test_what_is_no_call_is_text(text):
    for size in (1, 1000):
        early, rest, calls = read(TAGGED, text, size)
        assert early + rest == text and not calls


@pytest.mark.parametrize("size", (1, 1000))
def test_bare_calls(size):
    early, rest, calls = read(BARE, ' {"name": "f", "parameters": {"x": 1}}', size)
    assert not early and not rest and [(c.name, c.arguments) for c in calls] == [("f", '{"x": 1}')]
    for text in ("Hello {you}", '{"name": "f"}', '{"a": 1} and more'):
        early, rest, calls = read(BARE, text, size)
        assert early + rest == text and not calls


def test_without_tools_all_is_text():
    assert read(None, "<tool_call>", 1) == ("<tool_call>", "", [])


def test_which_form_a_template_has():
    assert form_of(QWEN) == TAGGED and form_of(LLAMA) == BARE
    for template in (None, "{{ messages }}", "{{ tools }}"):
        with pytest.raises(InputError, match="defines no calls"):
            form_of(template)


def test_messages_as_templates_take_them():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = Message(role="assistant", tool_calls=[call])
    assert as_dict(message)["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert as_dict(message)["content"] == ""
    parts = Message(role="developer", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert as_dict(parts) == {"role": "system", "content": "ab"}
    answer = Message(role="tool", content="7", tool_call_id="c", name="f")
    assert as_dict(answer) == {"role": "tool", "content": "7", "tool_call_id": "c", "name": "f"}
    with pytest.raises(InputError, match="image_url"):
        as_dict(Message(role="user", content=[{"type": "image_url"}]))
