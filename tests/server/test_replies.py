"""Replies to chats with tools, from a model that writes a given text, through the routes."""
import json
from types import SimpleNamespace

import pytest
from helpers.tokenizers import changed_json, write_byte_tokenizer
from starlette.testclient import TestClient

from engine.request import Draft, Event, Request
from server.app import Server, make_app
from server.metrics import Metrics
from server.replies import Reply
from server.worker import Worker
from tokens.channels import CHANNEL_TAGS
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

    batch, window, max_seq_len, busy, passes = 1, 1, 1000, False, SimpleNamespace(fallbacks=())

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
        thoughts = "".join(p["delta"].get("reasoning_content", "") for p in parts)
        assert thoughts == choice["message"].get("reasoning_content", "")
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
    (CODER, {"control": (*TAGS, "</function>", "</parameter>")}, None, [F]),
    (CODER, {"control": ("<function=", "<parameter=", "</parameter>\n")}, None, [F]),
    (f"So. {JSON}{CODER}", {"control": TAGS}, "So. ", [G, F]),
    (JSON + CODER, {"parallel_tool_calls": False}, None, [G]),
    (JSON, {"tool_choice": "none"}, JSON, []), (JSON, {"tools": []}, JSON, []),
    (f"{JSON}</think>{CODER}", {"template": TEMPLATE + "<think>\n", "control": ("<think>", "</think>")},
     f"{JSON}</think>", [F]),
    ('{"name": "f", "arguments": {"n": 3}}',
     {"tool_choice": "required", "template": "{{ tools }}<think>"}, None, [F]),
), ids=range(8))
def test_calls_are_found_in_what_the_model_writes(ask, text, more, content, calls):
    message = ask(text, **more)
    assert (message["content"], calls_of(message)) == (content, calls)


HARMONY = (
    "{{ reasoning_effort }}{% for m in messages %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{{ '<|channel|>analysis<|message|>' if open }}"
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>Hm.<|end|>", "<|channel|>final<|message|>Yes, to=f."
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}'
CALL_BY_ROLE = ' to=functions.f<|channel|>commentary json<|message|>{"n": 3}'
CALL_G = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}"


@pytest.mark.parametrize("control, text, more, content, thoughts, calls", (
    (CHANNEL_TAGS, ANALYSIS + NEXT + FINAL, {}, "Yes, to=f.", "Hm.", []),
    ((), FINAL, {}, "Yes, to=f.", None, []), (CHANNEL_TAGS, ANALYSIS[:-7], {}, "", "Hm.", []),  # cut off
    ((), ANALYSIS + NEXT + CALL, {}, None, "Hm.", [F]),
    (CHANNEL_TAGS, ANALYSIS + NEXT + CALL_BY_ROLE, {}, None, "Hm.", [F]),
    (CHANNEL_TAGS, CALL + "<|end|>" + NEXT + CALL_G + "<|end|>", {}, None, None, [F, G]),
    ((), ANALYSIS.replace("analysis", "commentary") + NEXT + CALL, {}, None, "Hm.", [F]),  # a preamble
    (CHANNEL_TAGS, CALL.replace("functions.f", "python"), {}, "", '{"n": 3}', []),
    ((), CALL, {"tools": []}, "", '{"n": 3}', []), (CHANNEL_TAGS, CALL[:-1], {}, '{"n": 3', None, []),
    (CHANNEL_TAGS, "to be", {}, "to be", None, []), (CHANNEL_TAGS, ANALYSIS + NEXT, {}, "", "Hm.", []),
    ((), f"Hm.<|end|>{NEXT}{FINAL}", {"chat_template_kwargs": {"open": True}}, "Yes, to=f.", "Hm.", []),
    ((), '{"name": "f", "arguments": {"n": 3}}', {"tool_choice": "required"}, None, None, [F]),
), ids=range(14))
def test_channels_of_harmony(ask, control, text, more, content, thoughts, calls):
    message = ask(text, control, HARMONY, **more)
    found = message["content"], message.get("reasoning_content"), calls_of(message)
    assert found == (content, thoughts, calls)


def test_scores_of_a_tree_are_json():
    """Of prompt lookup, too, whose chains without a match have none: JSON has no infinity."""
    reply = SimpleNamespace(body=SimpleNamespace(return_speculation=True), tokens=SimpleNamespace(text=str))
    draft = Draft([5, 6, 7], [0, 0, 0], [0, 1], [0.0, -0.5, float("-inf")])
    told = Reply.speculation(reply, Event(None, [6, 8], "", 1, [], 2, draft, None))["speculation"]
    assert json.loads(json.dumps(told, allow_nan=False))["tree"]["scores"] == [0.0, -0.5, -9999.0]
