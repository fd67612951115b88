"""Replies to chats with tools, from a model that writes a given text, through the routes."""
import json

import pytest
from helpers.tokenizers import changed_json, write_byte_tokenizer
from starlette.testclient import TestClient

from engine.request import Event, Request
from server.app import Server, make_app
from server.metrics import Metrics
from server.worker import Worker
from tokens.stops import StopStream
from tokens.tokenizer import Tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
TEMPLATE = "{% if tools %}<tool_call><function=f>{% endif %}{{ messages[0].content }}"
CODER = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
F, G = ("f", {"n": 3}), ("g", {})


class Engine:
    """An engine that writes one text, a token a step."""

    batch, window, max_seq_len, busy, fallbacks = 1, 1, 1000, False, ()

    def __init__(self, tokenizer: Tokenizer, text: str):
        self.tokenizer, self.text, self.free = tokenizer, text, 1

    def check(self, *_) -> None:
        pass

    guide = check

    def admit(self, prompt, sampling, shown=(), **_) -> Request:
        stream = StopStream(self.tokenizer.stream(shown), ())
        self.request = Request(prompt, sampling, stream=stream, first=1.0)
        self.left = self.tokenizer.encode(self.text, parse_special=True)
        self.free, self.busy = 0, True
        return self.request

    def leave(self, _) -> None:
        self.free, self.busy = 1, False

    def step(self) -> list[Event]:
        self.request.last = 2.0
        ids = [self.left.pop(0)]
        text, _ = self.request.emit(ids, [])
        return [Event(self.request, ids, text, 0, [], 0, None, None if self.left else "stop")]


@pytest.fixture
def ask(tmp_path):
    """A function (text that the model writes, names of control tokens, **body) -> the choice.

    It asks for a whole reply and for a stream, which have to be the same.
    """
    def asked(text: str, control: tuple[str, ...] = (), template: str = TEMPLATE, **body) -> dict:
        plain, folder = tmp_path / "plain", tmp_path / "tools"
        plain.mkdir()
        folder.mkdir()
        write_byte_tokenizer(plain)
        changed_json(plain, folder, *({"content": tag} for tag in control))
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer.load(folder)
        worker = Worker(Engine(tokenizer, text), Metrics("x", 1, 1))
        worker.start()
        client = TestClient(make_app(Server(worker, tokenizer, ("x",))))
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **body}
        (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
        worker.stop()
        parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith('data: {"')]
        assert "".join(p["delta"].get("content", "") for p in parts) == (choice["message"]["content"] or "")
        streamed = [call for p in parts for call in p["delta"].get("tool_calls", [])]
        assert [call.pop("index") for call in streamed] == [*range(len(streamed))]
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"] for call in streamed] == [call["function"] for call in calls]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")
        return choice["message"]
    return asked


def calls_of(message: dict) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])]


TAGS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("text, more, content, calls", (
    (CODER, {}, None, [F]), (CODER, {"control": TAGS}, None, [F]),
    (CODER, {"control": (*TAGS, "</function>", "</parameter>")}, None, [F]),
    (CODER, {"control": ("<function=f>", "<parameter=n>\n")}, None, [F]),
    (CODER, {"control": ("<function=", "<parameter=", "</parameter>\n")}, None, [F]),
    (f"So. {JSON}{CODER}", {"control": TAGS}, "So. ", [G, F]),
    (JSON + CODER, {"parallel_tool_calls": False}, None, [G]),
    (JSON, {"tool_choice": "none"}, JSON, []), (JSON, {"tools": []}, JSON, []),
    (f"{JSON}</think>{CODER}", {"template": TEMPLATE + "<think>\n"}, f"{JSON}</think>", [F]),
    (f"{JSON}</think>{CODER}", {"template": TEMPLATE + "<think>\n", "control": ("<think>", "</think>")},
     f"{JSON}</think>", [F]),
    *((lines.join(('{"name": "f", "parameters": {"n": 3}}', '{"name": "g", "parameters": {}}')),
       {"template": '{% if tools %}"parameters" ipython{% endif %}'}, None, [F, G])
      for lines in ("; ", "\n")),
    ('{"name": "f", "arguments": {"n": 3}}',
     {"tool_choice": "required", "template": "{{ tools }}<think>"}, None, [F]),
), ids=range(14))
def test_calls_are_found_in_what_the_model_writes(ask, text, more, content, calls):
    message = ask(text, **more)
    assert (message["content"], calls_of(message)) == (content, calls)
