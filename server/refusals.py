"""What a request hears that is not answered: refusals in OpenAI's form, and the gate before the routes."""
from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from server.worker import Failure

RETRY_AFTER = "2"  # seconds, for those who do not fit
SLOWEST = 60.0  # seconds in which a body has to be there
MOST_HELD = 256 << 20  # bytes of all bodies that are being sent; one as long as allowed has room in any case


class Refusal(Exception):
    """A request that is not answered, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def response(self) -> JSONResponse:
        headers = {"Retry-After": RETRY_AFTER} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, headers)

    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Gate:
    """ASGI: refuses requests without the key, and bodies that are too long, too slow, or together too large,
    before the routes see them.

    open_to_all: paths that need no key.
    """

    def __init__(self, app, key: str | None, most_bytes: int, open_to_all: tuple[str, ...]):
        self.app, self.key, self.most, self.open_to_all = app, key, most_bytes, open_to_all
        self.held = 0  # bytes of bodies that are not complete yet

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        key, most = self.key, self.most
        if key is not None and scope["path"] not in self.open_to_all and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not secrets.compare_digest(given.strip(), key.encode()):
                await Refusal(401, "the API key is missing or wrong", "invalid_api_key").response()(
                    scope, receive, send
                )
                return
        length = headers.get(b"content-length", b"")
        try:
            if length.isdigit() and int(length) > most:
                raise _too_long(most)
            body = await asyncio.wait_for(self._body(receive), SLOWEST)
        except asyncio.TimeoutError:
            slow = Refusal(408, f"the request was not there after {SLOWEST:.0f} s", "request_timeout")
            await slow.response()(scope, receive, send)
            return
        except Refusal as e:
            await e.response()(scope, receive, send)
            return
        if body is None:
            return
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)

    async def _body(self, receive) -> bytes | None:
        """The body of a request; None if its client has gone. Raises Refusal."""
        parts, size, more = [], 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part, more = message.get("body", b""), message.get("more_body", False)
                parts.append(part)
                size, self.held = size + len(part), self.held + len(part)
                if size > self.most:
                    raise _too_long(self.most)
                if more and self.held > max(MOST_HELD, self.most):
                    raise Refusal(503, "too many requests are being sent at once", "overloaded")
        finally:
            self.held -= size
        return b"".join(parts)


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"the request is longer than {most:,} bytes", "request_too_large")


def refusal_of(failure: Failure) -> Refusal:
    """How it is told that a job failed."""
    return Refusal({"request": 400, "time": 504, "server": 500, "closing": 503}[failure.fault], failure.why)


def refusal_of_body(first: dict, headers: Mapping[str, str]) -> Refusal:
    """How the first thing that is wrong with a body is told, as pydantic says it."""
    # The names of a union's members stand there too.
    parts = [str(x) for x in first["loc"] if x not in ("body", "str", "int") and "[" not in str(x)]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return Refusal(400, f"the body is no JSON: {why} (character {first['loc'][-1]})", "invalid_json")
    where = ".".join(parts)
    if not where and "json" not in headers.get("content-type", ""):
        return Refusal(400, "the body: JSON is expected, and Content-Type: application/json", "invalid_value")
    return Refusal(400, f"{where or 'the body'}: {first['msg']}", "invalid_value", where or None)


def add_handlers(app: FastAPI) -> None:
    """Let an app answer with refusals, whatever goes wrong with a request."""

    @app.exception_handler(Refusal)
    async def refused(request: Request, e: Refusal) -> Response:
        return e.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, e: HTTPException) -> Response:
        if e.status_code == 400:  # fastapi's, where reading JSON raised anything but a JSONDecodeError
            words = "the body is no JSON that can be read: no UTF-8, nested too deeply, or too long a number"
            return Refusal(400, words, "invalid_json").response()
        response = Refusal(e.status_code, str(e.detail)).response()
        response.headers.update(e.headers or {})  # which methods are allowed
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, e: RequestValidationError) -> Response:
        errors = e.errors()
        # Of a union's members, one that had the right type says what is wrong.
        fitting = [error for error in errors if not error["type"].endswith("_type")]
        return refusal_of_body((fitting or errors)[0], request.headers).response()
