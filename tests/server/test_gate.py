"""The gate before the routes: clients that hold back the ends of their bodies."""
import asyncio
import json

from server import gate

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def test_bodies_are_bounded_in_time_and_together(monkeypatch):
    """The last clients have to come back, and nothing is held later."""
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
