"""Clients of servers that speak OpenAI's form: what they ask, and what they saw."""
from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import NamedTuple

import httpx
from bench import ROOT  # first: it makes the modules below importable
from peer_process import HttpPeer

from common.errors import InputError

RETRY = 0.5  # seconds after a refusal for want of places
PATIENCE = 600.0  # seconds that an answer may take


def our_server(checkpoint: str, *options: str) -> HttpPeer:
    """serve.py of this checkpoint."""
    return HttpPeer("serve.py", [
        sys.executable, str(ROOT / "serve.py"), "--checkpoint", checkpoint, *options,
    ])


class Answer(NamedTuple):
    """What a client got. Times in seconds; nan where there is no token to time."""

    text: str
    finish: str | None  # None: the client went before the end
    tokens: int  # completion tokens, as the server counts them
    first: float  # from the first try to the first text
    later: float  # from the first text to the last
    refused: int  # how often it was told to come again


async def ask(client: httpx.AsyncClient, body: dict, leave: int | None = None) -> Answer:
    """Ask for a chat completion, again while there is no place. leave: go after so many events of a stream.

    Raises InputError if the server answers with an error, or not to the end.
    """
    began, refused = time.perf_counter(), 0
    while True:
        try:
            found = await _ask_once(client, body, leave, began, refused)
        except httpx.HTTPError as e:
            raise InputError(f"no whole answer ({type(e).__name__}: {e})") from None
        if found is not None:
            return found
        refused += 1
        await asyncio.sleep(RETRY)


async def _ask_once(
    client: httpx.AsyncClient, body: dict, leave: int | None, began: float, refused: int
) -> Answer | None:
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    text, finish, tokens, first, last, events = "", None, 0, float("nan"), float("nan"), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code == 429:
            return None
        if response.status_code != 200:
            told = (await response.aread()).decode(errors="replace")
            raise InputError(f"status {response.status_code}: {told[:300]}")
        if not body.get("stream"):
            answer = json.loads(await response.aread())
            choice = answer["choices"][0]
            return Answer(
                choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"],
                float("nan"), float("nan"), refused,
            )
        async for line in response.aiter_lines():
            if leave is not None and events >= leave:
                return Answer(text, None, 0, first - began, last - first, refused)
            if not line.startswith("data: {"):
                continue
            events, event = events + 1, json.loads(line[6:])
            if "error" in event:
                raise InputError(f"an error in a stream: {event['error']['message']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                finish = choice.get("finish_reason") or finish
                if piece := choice["delta"].get("content"):
                    text, last = text + piece, time.perf_counter()
                    first = last if first != first else first
    if finish is None:
        raise InputError("a stream ended without a finish reason")
    return Answer(text, finish, tokens, first - began, last - first, refused)
