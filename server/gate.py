"""ASGI middleware for API keys, body limits and logging; error handlers."""
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

BODY_TIMEOUT = 60.0  # seconds to receive a complete body
MAX_BUFFERED_BYTES = 256 << 20  # of all incomplete bodies together


class Gate:
    """ASGI middleware. open_paths: need no API key. log: called with a line per POST request and error."""

    def __init__(self, app, key: str | None, max_body_bytes: int, open_paths: tuple[str, ...], log=None):
        self.app, self.key, self.open_paths, self.log = app, key, open_paths, log
        self.max_body_bytes, self.buffered = max_body_bytes, 0  # buffered: current bytes of incomplete bodies

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = {**scope}  # uvicorn keeps the original
        status, error_message = 499, ""  # 499, as in nginx: the client has disconnected

        async def send_and_record(message) -> None:
            nonlocal status, error_message
            status = message.get("status", status)
            if status >= 400 and message.get("body"):
                with contextlib.suppress(ValueError):  # errors of file ranges are plain text
                    error_message = json.loads(message["body"])["error"]["message"]
            await send(message)

        try:
            await self._handle(scope, receive, send_and_record)
        except Exception:
            status = 500
            raise
        finally:
            # Pages and health probes are not logged.
            if self.log and (scope["method"] == "POST" or status >= 400):
                reply = scope.get("state", {}).get("reply")
                detail = printable(error_message, 300) or (reply.summary() if reply else "")
                self.log(f"{scope['method']} {printable(scope['path'])} {status} {detail}".rstrip())

    async def _handle(self, scope, receive, send) -> None:
        try:
            headers = dict(scope["headers"])
            self._normalize(scope, headers)
            if self.key and scope["path"] not in self.open_paths and scope["method"] != "OPTIONS":
                self._check_key(headers.get(b"authorization", b""))
            length = headers.get(b"content-length", b"")
            self._check_size(int(length) if length.isdigit() else 0)
            body = await asyncio.wait_for(self._body(receive), BODY_TIMEOUT)
        except (Refusal, asyncio.TimeoutError) as e:
            if not isinstance(e, Refusal):
                message = f"the request was not complete after {BODY_TIMEOUT:.0f} s"
                e = Refusal(408, message, "request_timeout")
            await e.response()(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return messages.pop() if messages else await receive()

        if body is not None:  # None: the client has disconnected
            await self.app(scope, replay, send)

    def _normalize(self, scope: dict, headers: dict) -> None:
        """Normalize path, method and content type of a request. Raises Refusal for a compressed body."""
        # Base URLs may cause double slashes.
        scope["path"] = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        if scope["method"] == "HEAD":  # uvicorn omits the body
            scope["method"] = "GET"
        # Clients may omit the JSON content type, but not browsers (with Origin): it makes them ask for CORS.
        if b"origin" not in headers and scope["method"] == "POST":
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        if (coding := headers.get(b"content-encoding", b"identity").decode("latin-1").lower()) != "identity":
            raise Refusal(415, f"Content-Encoding {printable(coding)}: is not supported; send plain JSON")

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.key.encode()):
            raise Refusal(401, "the API key is missing or wrong", "invalid_api_key")

    def _check_size(self, size: int) -> None:
        if size > self.max_body_bytes:
            message = f"the request is longer than {self.max_body_bytes:,} bytes"
            raise Refusal(413, message, "request_too_large")

    async def _body(self, receive) -> bytes | None:
        """Return the body of a request; None if the client disconnects. Raises Refusal."""
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self.buffered += len(part)
                self._check_size(len(body))
                if more and self.buffered > max(MAX_BUFFERED_BYTES, self.max_body_bytes):
                    raise Refusal(503, "too many requests are being sent at once", "overloaded")
        finally:
            self.buffered -= len(body)
        return bytes(body)


EMBEDDINGS = "embeddings: not supported; this server has a text generation model"
UNSUPPORTED_ROUTES = {
    "/embeddings": EMBEDDINGS, "/rerank": EMBEDDINGS, "/score": EMBEDDINGS, "/pooling": EMBEDDINGS,
    **dict.fromkeys(("/audio/transcriptions", "/audio/speech", "/images/generations"),
                    "this server reads and writes text only"),
}


def add_handlers(app: FastAPI) -> None:
    """Convert all errors of an app to a Refusal."""

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, e: HTTPException) -> Response:
        message, cause = str(e.detail), e.__cause__
        if e.status_code == 404:
            message = UNSUPPORTED_ROUTES.get(http.url.path.removeprefix("/v1"), "no such route; see /docs")
        elif isinstance(cause, UnicodeDecodeError):
            message = f"the body is not UTF-8 (byte {cause.start})"
        elif isinstance(cause, RecursionError):
            message = "the body is nested too deeply"
        response = Refusal(e.status_code, message).response()
        response.headers.update(e.headers or {})  # such as Allow
        return response

    app.add_exception_handler(Refusal, lambda http, e: e.response())
    internal_error = Refusal(500, "internal error; see the server's log")
    app.add_exception_handler(Exception, lambda http, e: internal_error.response())
    app.add_exception_handler(
        RequestValidationError, lambda http, e: refusal_of_body(e.errors(), http.headers).response()
    )
