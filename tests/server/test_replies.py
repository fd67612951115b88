"""Chats with tools, with a fake engine that generates a fixed text; device failures; limits of bodies."""
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
        self.remaining_ids = self.tokenizer.encode(self.text, parse_special=True)
        self.free, self.busy = 0, True
        return self.request

    def remove(self, _) -> None:
        self.free, self.busy = 1, False

    def step(self) -> list[Event]:
        self.request.last = 2.0
        ids = [self.remaining_ids.pop(0)]
        text, _ = self.request.emit(ids, [])
        return [Event(self.request, ids, text, 0, [], 0, None, None if self.remaining_ids else "stop")]


def started(folder, text: str = "", template: str = TEMPLATE, control: tuple[str, ...] = ()):
    """Start a worker with a fake engine; return (worker, client). control: additional control tokens."""
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
REASONING = f"{JSON}</think>"
F, G = ("f", {"n": 3}), ("g", {})
TAGS = ("<tool_call>", "</tool_call>")
REQUIRED = '{"name": "f", "arguments": {"n": 3}}', {"tool_choice": "required"}, None, None, [F]
CALLS = (  # template, control tokens, the model's text, fields of the body; content, reasoning and calls
    (TEMPLATE, (*TAGS, "</function>", "</parameter>"), CODER, {}, None, None, [F]),
    (TEMPLATE, ("<function=", "<parameter=", "</parameter>\n"), CODER, {}, None, None, [F]),
    (TEMPLATE, TAGS, f"So. {JSON}{CODER}", {}, "So. ", None, [G, F]),
    (TEMPLATE, (), JSON + CODER, {"parallel_tool_calls": False}, None, None, [G]),
    (TEMPLATE, (), JSON, {"tool_choice": "none"}, JSON, None, []),
    (TEMPLATE + "<think>\n", ("<think>", "</think>"), REASONING + CODER, {}, REASONING, None, [F]),
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
def test_content_reasoning_and_calls(tmp_path, template, control, text, more, content, reasoning, calls):
    """They are separated, and equal in the complete and the streamed response."""
    (worker, client), path = started(tmp_path, text, template, control), "/v1/chat/completions"
    (choice,) = client.post(path, json=BODY | more).json()["choices"]
    lines = client.post(path, json={**BODY, **more, "stream": True}).text.split("\n\n")
    worker.stop()
    message, chunks = choice["message"], [json.loads(x[6:])["choices"][0] for x in lines if "{" in x]
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert [(call["name"], json.loads(call["arguments"])) for call in functions] == calls
    for name, expected in ("content", content), ("reasoning_content", reasoning):
        assert "".join(chunk["delta"].get(name, "") for chunk in chunks) == (expected or "")
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call["function"] for call in streamed] == functions
    assert [call["index"] for call in streamed] == [*range(len(calls))]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")


RESPONSES = (  # template, generated text; types of output items, and their text
    (TEMPLATE, "Hi.", ["message"], "Hi."), (TEMPLATE, JSON, ["function_call"], ""),
    (TEMPLATE, f"So. {JSON}{CODER}", ["message", "function_call", "function_call"], "So. "),
    (HARMONY, ANALYSIS + NEXT + FINAL, ["reasoning", "message"], "Hm.Yes, to=f."),
    (HARMONY, ANALYSIS + NEXT + CALL, ["reasoning", "function_call"], "Hm."),
)


@pytest.mark.parametrize("template, text, item_types, texts", RESPONSES, ids=range(len(RESPONSES)))
def test_responses_api(tmp_path, template, text, item_types, texts):
    """Streamed and complete responses are equal, and valid input of the next turn."""
    worker, http = started(tmp_path, text, template)
    client = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": "x", "input": "hi", "instructions": "be kind", "tools": tools}
    whole = client.responses.create(**body, max_output_tokens=900, reasoning={"effort": "low"})
    with client.responses.stream(**body) as stream:
        events = [*stream]
        streamed = stream.get_final_response()
    history = [{"role": "user", "content": "hi"}]
    history += [item.model_dump(exclude_none=True) for item in whole.output]
    calls = [item for item in whole.output if item.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": item.call_id, "output": "7"} for item in calls]
    next_turn = client.responses.create(**body | {"input": history})
    errors = [http.post("/v1/responses", json=body | more).json() for more in (
        {"previous_response_id": "y"}, {"input": [{"type": "image"}]}, {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "function", "name": "h"}}, {"input": []}, {"input": [{"role": "user"}]})]
    nulls = {"max_output_tokens": None, "temperature": None}
    with_nulls = http.post("/v1/responses", json=body | nulls).json()
    worker.stop()
    assert [item.type for item in whole.output] == [item.type for item in streamed.output] == item_types
    for response in whole, streamed:
        item_texts = (item.content[0].text for item in response.output if item.type != "function_call")
        assert "".join(item_texts) == texts and response.usage.output_tokens > 0
        assert response.status == "completed"
    assert whole.output_text == streamed.output_text == next_turn.output_text
    deltas = (event.delta for event in events if event.type.endswith("text.delta"))
    assert "".join(deltas) == texts and [event.sequence_number for event in events] == [*range(len(events))]
    for item, other in zip(whole.output, streamed.output):
        if item.type == "function_call":
            assert (item.name, item.arguments) == (other.name, other.arguments)
    reasons = "as nothing is stored", "input.0: 'image'", "tools.0: type 'web_s", "the function is not in", \
        "input is []; expected at least 1 item", "messages.1.content is missing"
    assert with_nulls["status"] == "completed"
    for error, reason in zip(errors, reasons):
        assert reason in error["error"]["message"]


def test_line_separators_in_streams_are_escaped(tmp_path):
    """httpx splits lines at these characters (str.splitlines)."""
    text = "one\u2028two\x85three\u2029\x0c\x1cé"
    worker, client = started(tmp_path, text)
    lines = client.post("/v1/chat/completions", json={**BODY, "stream": True}).text.splitlines()
    worker.stop()
    chunks = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(chunk.get("content", "") for chunk in chunks) == text
    assert all(line.startswith("data: ") for line in lines if line)


@pytest.mark.parametrize("remove_fails, statuses", (
    (False, [500, 500, 200, 500, 500, 500, 503]), (True, [500, 503]),
), ids=("step", "step and remove"))
def test_repeated_device_failures_stop_the_server(tmp_path, remove_fails, statuses):
    """A failed step fails the running requests. Three in a row, or a failed `remove`, stop the server."""
    def fail(*_):
        raise RuntimeError("the device is gone")

    def step() -> list[Event]:
        return fail() if next(next_status) == 500 else Engine.step(worker.engine)

    next_status, (worker, client) = iter(statuses), started(tmp_path, "x")
    worker.engine.step, worker.engine.remove = step, fail if remove_fails else worker.engine.remove
    responses = [client.post("/v1/chat/completions", json=BODY) for _ in statuses]
    assert [response.status_code for response in responses] == statuses
    assert client.get("/health").status_code == 503
    assert "the device is gone" in responses[0].json()["error"]["message"]
    worker.stop()


def test_infinite_scores_are_replaced_in_json():
    """Prompt lookup scores chains without a match with -inf, which JSON does not have."""
    reply = SimpleNamespace(body=SimpleNamespace(return_speculation=True), tokens=SimpleNamespace(text=str))
    draft = Draft([5, 6, 7], [0, 0, 0], [0, 1], [0.0, -0.5, float("-inf")])
    field = Reply.speculation(reply, Event(None, [6, 8], "", 1, [], 2, draft, None))["speculation"]
    assert json.loads(json.dumps(field, allow_nan=False))["tree"]["scores"] == [0.0, -0.5, -9999.0]


# -- incomplete request bodies -------------------------------------------------------------------------------


SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def test_request_body_limits(monkeypatch):
    """Incomplete bodies time out (408), or exceed the common limit (503); all buffers are freed."""
    monkeypatch.setattr(gate, "MAX_BUFFERED_BYTES", 250)
    monkeypatch.setattr(gate, "BODY_TIMEOUT", 0.2)

    async def echo(scope, receive, send) -> None:
        await send({"status": 200, "body": (await receive())["body"]})

    async def send_body(*parts: bytes, ends: bool = False) -> list:
        unsent, responses = list(parts), []

        async def receive() -> dict:
            if not unsent:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": unsent.pop(0), "more_body": bool(unsent) or not ends}

        async def send(message: dict) -> None:
            responses.extend(message[key] for key in ("status", "body") if key in message)

        await middleware(SCOPE, receive, send)
        return responses

    async def send_all() -> list:
        complete = send_body(b"a" * 60, b"", b"b" * 40, ends=True)
        return await asyncio.gather(complete, *(send_body(b"a" * 90) for _ in range(5)))

    middleware = gate.Gate(echo, None, 100, ())
    first, *others = asyncio.run(send_all())
    assert first == [200, b"a" * 60 + b"b" * 40] and middleware.buffered == 0
    codes = [(status, json.loads(body)["error"]["code"]) for status, body in others]
    assert codes == [(408, "request_timeout")] * 2 + [(503, "overloaded")] * 3
