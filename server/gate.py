"""The gate before the routes: it refuses requests without the key, bodies too long or too slow, and logs."""
from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from common.errors import printable
from server.protocol import Refusal, refusal_of_body

SLOWEST = 60.0  # seconds until a body has to be complete
MOST_HELD = 256 << 20  # bytes of all incomplete bodies together; a single one is bounded by `most_bytes` only


class Gate:
    """ASGI middleware. most_bytes: of a body. open_paths: they need no key.

    log: called with a line for every POST request and every error.
    """

    def __init__(self, app, key: str | None, most_bytes: int, open_paths: tuple[str, ...], log=None):
        self.app, self.key, self.most, self.open_paths, self.log = app, key, most_bytes, open_paths, log
        self.held = 0  # bytes of incomplete bodies

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = {**scope}  # uvicorn keeps its own
        status, why = 499, ""  # as nginx has it: the client has gone

        async def sent(message) -> None:
            nonlocal status, why
            status = message.get("status", status)
            if status >= 400 and message.get("body"):
                with contextlib.suppress(ValueError):  # a file's range is refused in text
                    why = json.loads(message["body"])["error"]["message"]
            await send(message)

        try:
            await self._pass(scope, receive, sent)
        except Exception:
            status = 500
            raise
        finally:
            # Pages and probes of health would hide what people ask.
            if self.log and (scope["method"] == "POST" or status >= 400):
                reply = scope.get("state", {}).get("reply")
                words = printable(why, 300) or (reply.summary() if reply else "")
                self.log(f"{scope['method']} {printable(scope['path'])} {status} {words}".rstrip())

    async def _pass(self, scope, receive, send) -> None:
        try:
            headers = dict(scope["headers"])
            self._mend(scope, headers)
            if self.key and scope["path"] not in self.open_paths and scope["method"] != "OPTIONS":
                self._check_key(headers.get(b"authorization", b""))
            length = headers.get(b"content-length", b"")
            self._check_size(int(length) if length.isdigit() else 0)
            body = await asyncio.wait_for(self._body(receive), SLOWEST)
        except (Refusal, asyncio.TimeoutError) as e:
            slow = Refusal(408, f"the request was not complete after {SLOWEST:.0f} s", "request_timeout")
            await (e if isinstance(e, Refusal) else slow).response()(scope, receive, send)
            return
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return whole.pop() if whole else await receive()

        if body is not None:  # else the client has gone
            await self.app(scope, replay, send)

    def _mend(self, scope: dict, headers: dict) -> None:
        """Read a request as clients often send one. Raises Refusal for a compressed body."""
        # Slashes too many, from base URLs.
        scope["path"] = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        if scope["method"] == "HEAD":  # uvicorn leaves out the body
            scope["method"] = "GET"
        # A browser says where a page that posts comes from; others may send JSON under any name.
        if b"origin" not in headers and scope["method"] == "POST":
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        if (coding := headers.get(b"content-encoding", b"identity").decode("latin-1").lower()) != "identity":
            raise Refusal(415, f"Content-Encoding {printable(coding)}: is not supported; send plain JSON")

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(given.strip(), self.key.encode()):
            raise Refusal(401, "the API key is missing or wrong", "invalid_api_key")

    def _check_size(self, size: int) -> None:
        if size > self.most:
            raise Refusal(413, f"the request is longer than {self.most:,} bytes", "request_too_large")

    async def _body(self, receive) -> bytes | None:
        """Return the body of a request, None if its client has gone. Raises Refusal."""
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self.held += len(part)
                self._check_size(len(body))
                if more and self.held > max(MOST_HELD, self.most):
                    raise Refusal(503, "too many requests are being sent at once", "overloaded")
        finally:
            self.held -= len(body)
        return bytes(body)


EMBEDDINGS = "embeddings: this server has a model that generates text; they need an embedding model"
REASONS = {
    "/embeddings": EMBEDDINGS, "/rerank": EMBEDDINGS, "/score": EMBEDDINGS, "/pooling": EMBEDDINGS,
    **dict.fromkeys(("/audio/transcriptions", "/audio/speech", "/images/generations"),
                    "this server reads and writes text only"),
}


def add_handlers(app: FastAPI) -> None:
    """Make an app answer every error with a Refusal."""

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, e: HTTPException) -> Response:
        words, cause = str(e.detail), e.__cause__
        if e.status_code == 404:
            words = REASONS.get(http.url.path.removeprefix("/v1"), "there is no such route; /docs has all")
        elif isinstance(cause, UnicodeDecodeError):
            words = f"the body is no UTF-8 (byte {cause.start})"
        elif isinstance(cause, RecursionError):
            words = "the body is nested too deeply"
        response = Refusal(e.status_code, words).response()
        response.headers.update(e.headers or {})  # the allowed methods
        return response

    app.add_exception_handler(Refusal, lambda http, e: e.response())
    bug = Refusal(500, "a bug in the server; see its log")
    app.add_exception_handler(Exception, lambda http, e: bug.response())
    app.add_exception_handler(
        RequestValidationError, lambda http, e: refusal_of_body(e.errors(), http.headers).response()
    )
