"""Parts of the server alone: the gate before the routes, schemas of outputs, metrics, an address."""
import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from helpers.refusals import refused

import serve
from server import gate
from server.app import EventStream
from server.metrics import Metrics
from server.protocol import CompletionBody
from server.worker import Worker

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """A request that sends its parts, and then waits forever unless the last one ends it."""

    def __init__(self, *parts: bytes, ends: bool = False):
        self.parts, self.ends, self.answer = list(parts), ends, []

    async def receive(self) -> dict:
        if not self.parts:
            await asyncio.Event().wait()
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or not self.ends}

    async def send(self, message: dict) -> None:
        self.answer.append(message.get("status") or message["body"])


async def echo(scope, receive, send) -> None:
    await send({"status": 200})
    await send({"body": (await receive())["body"]})


def test_bodies_are_bounded_in_time_and_together(monkeypatch):
    """Clients that hold back their ends: the last ones have to come back, and nothing is held later."""
    monkeypatch.setattr(gate, "MOST_HELD", 250)
    monkeypatch.setattr(gate, "SLOWEST", 0.2)
    one = gate.Gate(echo, None, 100, ())
    parts = Client(b"a" * 60, b"", b"b" * 40, ends=True)
    clients = [parts, *(Client(b"a" * 90) for _ in range(5))]

    async def all_of_them() -> None:
        await asyncio.gather(*(one(SCOPE, c.receive, c.send) for c in clients))

    asyncio.run(all_of_them())
    assert parts.answer == [200, b"a" * 60 + b"b" * 40] and one.held == 0
    answers = [(c.answer[0], json.loads(c.answer[1])["error"]["code"]) for c in clients[1:]]
    assert answers == [(408, "request_timeout")] * 2 + [(503, "overloaded")] * 3


def test_the_schema_of_the_output_wherever_a_client_has_it():
    own, form = {"a": 1}, "response_format"
    for body, schema in (
        ({}, None), ({form: {"type": "text", "schema": own}}, None),
        ({form: {"type": "json_object", "schema": None}}, {"type": "object"}),
        ({form: {"type": "json_object", "schema": own}}, own),
        ({form: {"type": "json_schema", "schema": own}}, own),
        ({form: {"type": "json_schema", "json_schema": {"schema": own}}}, own),
        ({"json_schema": own}, own), ({"guided_json": '{"a": 1}'}, own),
        ({"structured_outputs": {"json": own}}, own),
    ):
        found = CompletionBody(prompt="x", **body).schema_text
        assert (found and json.loads(found)) == schema, body


def test_metrics_name_what_a_gpu_does_without():
    engine = SimpleNamespace(batch=1, passes=SimpleNamespace(fallbacks=["the step cannot be captured"]))
    text = Worker(engine, Metrics("x", 1, 1)).metrics.text().decode()
    assert 'eagle_fallback{model_name="x",reason="the step cannot be captured"} 1.0' in text


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        host, port = busy.getsockname()
        with refused(f"--host {host} --port {port}: Address already in use"):
            serve.listen(host, port)


def test_a_stream_that_ends_before_its_first_event_is_closed():
    """Its requests would be decoded to their ends for nobody."""
    closed = []

    async def events():
        yield "data: 1\n\n"

    async def gone(*message):
        raise OSError

    stream = EventStream(events(), lambda: closed.append(True))
    with pytest.raises(Exception):  # noqa: B017 - whatever the library makes of it
        asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone))
    assert closed == [True]
