"""Bodies of requests before the routes see them: too slow, and too many at once."""
import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from server import refusals
from server.refusals import Gate

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """A request that sends its parts, and then waits for ever unless the last one ends it."""

    def __init__(self, *parts: bytes, ends: bool):
        self.parts, self.ends, self.said = list(parts), ends, []

    async def receive(self) -> dict:
        if not self.parts:
            await asyncio.Event().wait()
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or not self.ends}

    async def send(self, message: dict) -> None:
        self.said.append(message)

    @property
    def status(self) -> int:
        return self.said[0]["status"]

    @property
    def code(self) -> str:
        return json.loads(self.said[1]["body"])["error"]["code"]


async def echo(scope, receive, send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def gate(most: int = 100) -> Gate:
    return Gate(echo, None, most, ())


def test_a_body_in_parts_is_whole():
    client = Client(b"a" * 60, b"", b"b" * 40, ends=True)
    asyncio.run(gate()(SCOPE, client.receive, client.send))
    assert client.status == 200 and client.said[1]["body"] == b"a" * 60 + b"b" * 40


def test_a_body_that_does_not_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(refusals, "SLOWEST", 0.05)
    client, one = Client(b"a", ends=False), gate()
    asyncio.run(one(SCOPE, client.receive, client.send))
    assert client.status == 408 and client.code == "request_timeout" and one.held == 0


def test_bodies_are_bounded_together(monkeypatch):
    """Clients that hold back their ends: the last ones are told to come back, and nothing is held later."""
    monkeypatch.setattr(refusals, "MOST_HELD", 250)
    monkeypatch.setattr(refusals, "SLOWEST", 0.2)
    one, clients = gate(), [Client(b"a" * 90, ends=False) for _ in range(5)]

    async def all_of_them() -> None:
        await asyncio.gather(*(one(SCOPE, c.receive, c.send) for c in clients))

    asyncio.run(all_of_them())
    assert [c.status for c in clients] == [408, 408, 503, 503, 503] and one.held == 0
    assert clients[-1].code == "overloaded"
