"""Parts of the server without a server: the gate before the routes, function calls, conversations."""
import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from common.errors import InputError
from server import gate
from server.protocol import Message
from server.replies import BARE, TAGGED, CallStream, form_of

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
QWEN = "{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}{{ messages }}"
LLAMA = '{% if tools %}{"name": x, "parameters": y} ipython{% endif %}{{ messages }}'


class Client:
    """A request that sends its parts, and then waits forever unless the last one ends it."""

    def __init__(self, *parts: bytes, ends: bool):
        self.parts, self.ends, self.answer = list(parts), ends, []

    async def receive(self) -> dict:
        if not self.parts:
            await asyncio.Event().wait()
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or not self.ends}

    async def send(self, message: dict) -> None:
        self.answer.append(message)

    @property
    def result(self) -> tuple[int, str]:
        """The status of the answer, and the code of its error or its body."""
        body = self.answer[1]["body"]
        return self.answer[0]["status"], json.loads(body)["error"]["code"] if body[:1] == b"{" else body


async def echo(scope, receive, send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_bodies_are_bounded_in_time_and_together(monkeypatch):
    """Clients that hold back their ends: the last ones have to come back, and nothing is held later."""
    monkeypatch.setattr(gate, "MOST_HELD", 250)
    monkeypatch.setattr(gate, "SLOWEST", 0.2)
    one = gate.Gate(echo, None, 100, ())
    parts = Client(b"a" * 60, b"", b"b" * 40, ends=True)
    clients = [parts, *(Client(b"a" * 90, ends=False) for _ in range(5))]

    async def all_of_them() -> None:
        await asyncio.gather(*(one(SCOPE, c.receive, c.send) for c in clients))

    asyncio.run(all_of_them())
    slow, many = (408, "request_timeout"), (503, "overloaded")
    assert parts.result == (200, b"a" * 60 + b"b" * 40) and one.held == 0
    assert [c.result for c in clients[1:]] == [slow, slow, many, many, many]


def read(form, text: str, size: int):
    """Push a text in pieces -> (text before its end, text at its end, calls)."""
    stream = CallStream(form)
    early = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    return early, rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("size", (1, 3, 1000))
def test_calls(size):
    text = (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    assert read(TAGGED, text, size) == ("Let me see.\n", "", [("f", '{"a": "é<"}'), ("g", "{}")])
    assert read(BARE, ' {"name": "f", "parameters": {"x": 1}}', size) == ("", "", [("f", '{"x": 1}')])


@pytest.mark.parametrize("form, text", (
    (TAGGED, "no call, a < b"), (TAGGED, "almost <tool_cal"), (TAGGED, "<tool_call>broken"), (TAGGED, ""),
    (TAGGED, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'), (None, "<tool_call>"),
    (BARE, "Hello {you}"), (BARE, '{"name": "f"}'), (BARE, '{"a": 1} and more'),
))
@pytest.mark.parametrize("size", (1, 1000))
def test_other_text_is_no_call(form, text, size):
    early, rest, calls = read(form, text, size)
    assert early + rest == text and not calls


def test_the_template_decides_the_form():
    assert form_of(QWEN) == TAGGED and form_of(LLAMA) == BARE
    for template in (None, "{{ messages }}", "{{ tools }}"):
        with pytest.raises(InputError, match="defines no calls"):
            form_of(template)


def test_messages_as_templates_take_them():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    function = {"name": "f", "arguments": {"x": 1}}
    assert Message(role="assistant", content=None, tool_calls=[call]).as_dict() == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message(role="developer", content=parts, tool_calls=[]).as_dict() == {"role": "system", "content": "ab"}
    answer = {"role": "tool", "content": "7", "tool_call_id": "c", "name": "f"}
    assert Message(**answer).as_dict() == answer
    with pytest.raises(ValidationError, match="image_url"):
        Message(role="user", content=[{"type": "image_url"}])
