"""Responses to chats with tools, from a fake model that generates a given text; device failures."""
import asyncio
import json
from types import SimpleNamespace

import openai
import pytest
from helpers.tokenizers import changed_json, write_byte_tokenizer
from starlette.testclient import TestClient

from engine.request import Draft, Event, Request
from server import gate
from server.app import Server, make_app
from server.metrics import Metrics
from server.replies import Reply
from server.worker import Worker
from tokens.channels import CHANNEL_TAGS
from tokens.tokenizer import Tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
TEMPLATE = "{% if tools %}<tool_call><function=f>{% endif %}{{ messages[0].content }}"


class Engine:
    """A fake engine that generates one text, one token per step."""

    batch, window, max_seq_len, busy, runner = 1, 1, 1000, False, SimpleNamespace(fallbacks=())
    max_lengths = 1000, 1000

    def __init__(self, tokenizer: Tokenizer, text: str):
        self.tokenizer, self.text, self.free = tokenizer, text, 1
        self.check = self.guide = lambda *_: None

    def admit(self, prompt, sampling, shown=(), **_) -> Request:
        self.request = Request(prompt, sampling, stream=self.tokenizer.stream(shown), first=1.0)
        self.left = self.tokenizer.encode(self.text, parse_special=True)
        self.free, self.busy = 0, True
        return self.request

    def remove(self, _) -> None:
        self.free, self.busy = 1, False

    def step(self) -> list[Event]:
        self.request.last = 2.0
        ids = [self.left.pop(0)]
        text, _ = self.request.emit(ids, [])
        return [Event(self.request, ids, text, 0, [], 0, None, None if self.left else "stop")]


def started(folder, text: str = "", template: str = TEMPLATE, control: tuple[str, ...] = ()):
    """Start a worker whose model generates a text; return (worker, client). control: further control tokens.
    """
    (folder / "plain").mkdir()
    (folder / "changed").mkdir()
    write_byte_tokenizer(folder / "plain")
    changed_json(folder / "plain", folder / "changed", *({"content": tag} for tag in control))
    (folder / "changed" / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(folder / "changed")
    worker = Worker(Engine(tokenizer, text), Metrics("x", 1, 1))
    worker.start()
    return worker, TestClient(make_app(Server(worker, tokenizer, ("x",))))


CODER = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
THOUGHT = f"{JSON}</think>"
F, G = ("f", {"n": 3}), ("g", {})
TAGS = ("<tool_call>", "</tool_call>")
REQUIRED = '{"name": "f", "arguments": {"n": 3}}', {"tool_choice": "required"}, None, None, [F]
CALLS = (  # template, control tokens, the model's text, fields of the body; content, reasoning and calls
    (TEMPLATE, (*TAGS, "</function>", "</parameter>"), CODER, {}, None, None, [F]),
    (TEMPLATE, ("<function=", "<parameter=", "</parameter>\n"), CODER, {}, None, None, [F]),
    (TEMPLATE, TAGS, f"So. {JSON}{CODER}", {}, "So. ", None, [G, F]),
    (TEMPLATE, (), JSON + CODER, {"parallel_tool_calls": False}, None, None, [G]),
    (TEMPLATE, (), JSON, {"tool_choice": "none"}, JSON, None, []),
    (TEMPLATE + "<think>\n", ("<think>", "</think>"), THOUGHT + CODER, {}, THOUGHT, None, [F]),
    ("{{ tools }}<think>", (), *REQUIRED),
)
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
CHANNELS = (
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
    ((), *REQUIRED),
)


@pytest.mark.parametrize("template, control, text, more, content, reasoning, calls", [
    *CALLS, *((HARMONY, *case) for case in CHANNELS)
], ids=range(21))
def test_calls_and_thoughts(tmp_path, template, control, text, more, content, reasoning, calls):
    """A stream adds up to the complete response."""
    (worker, client), path = started(tmp_path, text, template, control), "/v1/chat/completions"
    (choice,) = client.post(path, json=BODY | more).json()["choices"]
    lines = client.post(path, json={**BODY, **more, "stream": True}).text.split("\n\n")
    worker.stop()
    message, parts = choice["message"], [json.loads(x[6:])["choices"][0] for x in lines if "{" in x]
    asked = [call["function"] for call in message.get("tool_calls", [])]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert [(call["name"], json.loads(call["arguments"])) for call in asked] == calls
    for name, want in ("content", content), ("reasoning_content", reasoning):
        assert "".join(part["delta"].get(name, "") for part in parts) == (want or "")
    streamed = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [call["function"] for call in streamed] == asked
    assert [call["index"] for call in streamed] == [*range(len(calls))]
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")


RESPONSES = (  # template, the model's text; kinds of items, and their texts
    (TEMPLATE, "Hi.", ["message"], "Hi."), (TEMPLATE, JSON, ["function_call"], ""),
    (TEMPLATE, f"So. {JSON}{CODER}", ["message", "function_call", "function_call"], "So. "),
    (HARMONY, ANALYSIS + NEXT + FINAL, ["reasoning", "message"], "Hm.Yes, to=f."),
    (HARMONY, ANALYSIS + NEXT + CALL, ["reasoning", "function_call"], "Hm."),
)


@pytest.mark.parametrize("template, text, kinds, texts", RESPONSES, ids=range(len(RESPONSES)))
def test_responses(tmp_path, template, text, kinds, texts):
    """OpenAI's client assembles the response from the stream; it is sent back as input of the next turn."""
    worker, http = started(tmp_path, text, template)
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "x", "input": "hi", "instructions": "be kind", "tools": tools}
    whole = client.responses.create(**asked, max_output_tokens=900, reasoning={"effort": "low"})
    with client.responses.stream(**asked) as stream:
        events = [*stream]
        streamed = stream.get_final_response()
    history = [{"role": "user", "content": "hi"}]
    history += [one.model_dump(exclude_none=True) for one in whole.output]
    calls = [one for one in whole.output if one.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": one.call_id, "output": "7"} for one in calls]
    again = client.responses.create(**asked | {"input": history})
    wrong = [http.post("/v1/responses", json=asked | more).json() for more in (
        {"previous_response_id": "y"}, {"input": [{"type": "image"}]}, {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "function", "name": "h"}}, {"input": []}, {"input": [{"role": "user"}]})]
    given = http.post("/v1/responses", json=asked | {"max_output_tokens": None, "temperature": None}).json()
    worker.stop()
    assert [one.type for one in whole.output] == [one.type for one in streamed.output] == kinds
    for found in whole, streamed:
        said = (one.content[0].text for one in found.output if one.type != "function_call")
        assert "".join(said) == texts and found.status == "completed" and found.usage.output_tokens > 0
    assert whole.output_text == streamed.output_text == again.output_text
    deltas = (event.delta for event in events if event.type.endswith("text.delta"))
    assert "".join(deltas) == texts and [event.sequence_number for event in events] == [*range(len(events))]
    for one, other in zip(whole.output, streamed.output):
        if one.type == "function_call":
            assert (one.name, one.arguments) == (other.name, other.arguments)
    reasons = "nothing is stored here", "input.0: 'image'", "tools.0: type 'web_s", "tool_choice: names no", \
        "input is []; expected at least 1 item", "messages.1.content is missing"
    assert given["status"] == "completed"
    for found, words in zip(wrong, reasons):
        assert words in found["error"]["message"]


def test_lines_of_a_stream_are_lines_to_every_client(tmp_path):
    """httpx and requests also split lines at these characters."""
    text = "one\u2028two\x85three\u2029\x0c\x1cé"
    worker, client = started(tmp_path, text)
    lines = client.post("/v1/chat/completions", json={**BODY, "stream": True}).text.splitlines()
    worker.stop()
    chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(chunk.get("content", "") for chunk in chunks) == text
    assert all(line.startswith("data: ") for line in lines if line)


@pytest.mark.parametrize("gone, answers", (
    (False, [500, 500, 200, 500, 500, 500, 503]), (True, [500, 503]),  # gone: removing fails too
), ids=("fails", "gone"))
def test_a_device_that_fails_is_an_error_and_no_health(tmp_path, gone, answers):
    """A bug fails the running requests; three in a row stop the server."""
    def fail(*_):
        raise RuntimeError("the device is gone")

    def step() -> list[Event]:
        return fail() if next(left) == 500 else Engine.step(worker.engine)

    left, (worker, client) = iter(answers), started(tmp_path, "x")
    worker.engine.step, worker.engine.remove = step, fail if gone else worker.engine.remove
    found = [client.post("/v1/chat/completions", json=BODY) for _ in answers]
    assert [answer.status_code for answer in found] == answers and client.get("/health").status_code == 503
    assert "the device is gone" in found[0].json()["error"]["message"]
    worker.stop()


def test_scores_of_a_tree_are_json():
    """Prompt lookup gives chains without a match a score of -inf, which JSON cannot hold."""
    reply = SimpleNamespace(body=SimpleNamespace(return_speculation=True), tokens=SimpleNamespace(text=str))
    draft = Draft([5, 6, 7], [0, 0, 0], [0, 1], [0.0, -0.5, float("-inf")])
    told = Reply.speculation(reply, Event(None, [6, 8], "", 1, [], 2, draft, None))["speculation"]
    assert json.loads(json.dumps(told, allow_nan=False))["tree"]["scores"] == [0.0, -0.5, -9999.0]


# -- the gate before the routes: clients that hold back the ends of their bodies -----------------------------


SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def test_request_body_limits(monkeypatch):
    """When the limit is reached clients have to retry; afterwards no memory is held."""
    monkeypatch.setattr(gate, "MAX_BUFFERED_BYTES", 250)
    monkeypatch.setattr(gate, "BODY_TIMEOUT", 0.2)

    async def echo(scope, receive, send) -> None:
        await send({"status": 200, "body": (await receive())["body"]})

    async def answer_to(*parts: bytes, ends: bool = False) -> list:
        left, sent = list(parts), []

        async def receive() -> dict:
            if not left:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or not ends}

        async def send(message: dict) -> None:
            sent.extend(message[key] for key in ("status", "body") if key in message)

        await one(SCOPE, receive, send)
        return sent

    async def all_of_them() -> list:
        whole = answer_to(b"a" * 60, b"", b"b" * 40, ends=True)
        return await asyncio.gather(whole, *(answer_to(b"a" * 90) for _ in range(5)))

    one = gate.Gate(echo, None, 100, ())
    first, *others = asyncio.run(all_of_them())
    assert first == [200, b"a" * 60 + b"b" * 40] and one.buffered == 0
    codes = [(status, json.loads(body)["error"]["code"]) for status, body in others]
    assert codes == [(408, "request_timeout")] * 2 + [(503, "overloaded")] * 3
