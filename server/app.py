"""HTTP routes and streams. The model runs in `server.worker`."""
from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware

from common.errors import InputError, printable
from engine.request import Event, encode
from server.gate import Gate, add_handlers
from server.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, Refusal, TokenizeBody
from server.replies import ChatReply, CompletionReply, Reply, TokenFormatter
from server.responses import ResponsesBody, ResponsesReply
from server.worker import SHUTTING_DOWN, Job, Worker
from tokens.calls import UNTAGGED, call_format, shown_tags
from tokens.channels import has_channels, shown_channels
from tokens.tokenizer import PromptTooLong, Tokenizer

PAGE = Path(__file__).parent / "page"
FILES = {"/": "page.html"} | {f"/{name}": name for name in (
    "page.js", "markdown.js", "tree.js", "page.css", "markdown-it.js", "highlight.js", "LICENSES.txt")}
LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}  # many clients split lines there
PING_SECONDS = 1.0  # a stream without events sends a comment after this time, to detect disconnected clients
OPEN_PATHS = ("/health", "/metrics", "/docs", "/openapi.json", *FILES)  # need no API key, as in vLLM


class Server:
    """Turns request bodies into jobs, and their events into responses.

    models: accepted model names; responses have the first. time_limit: seconds per request. with_metrics: add
    `Reply.metrics` to every reply. max_tokens: default of requests that do not set it.
    """

    def __init__(
        self, worker: Worker, tokenizer: Tokenizer, models: tuple[str, ...], time_limit: float = 600.0,
        with_metrics: bool = False, max_tokens: int = 1 << 20,
    ):
        self.max_tokens = max_tokens
        self.worker, self.tokenizer, self.models = worker, tokenizer, models
        self.time_limit, self.with_metrics = time_limit, with_metrics
        self.tokens, self.max_seq_len = TokenFormatter(tokenizer), worker.engine.max_seq_len

    def model(self, name: str | None) -> str:
        """Return the model name of a request. Raises Refusal if it is unknown."""
        if name is not None and name not in self.models:
            message = f"model {printable(name)!r} not found; available: {', '.join(self.models)}"
            raise Refusal(404, message, "model_not_found", "model")
        return name or self.models[0]

    def response(self, body: ResponsesBody) -> ResponsesReply:
        """Prepare the reply to a request of the Responses API. Raises as `chat`."""
        return self.chat(body.chat(), partial(ResponsesReply, request_body=body))

    def chat(self, body: ChatBody, reply: Callable = ChatReply) -> ChatReply:
        """Prepare the reply to a chat. Raises InputError, ValueError or Refusal."""
        model, tokenizer = self.model(body.model), self.tokenizer
        channels = not body.is_forced and has_channels(tokenizer.template)
        call_tags, shown = None, shown_channels(tokenizer.control) if channels else []
        if body.tools and not channels:
            call_tags = UNTAGGED if body.is_forced else call_format(tokenizer.tool_template)
            shown = shown_tags(tokenizer.control) if call_tags else []
        options = {"shown": shown, "continues": body.continues}
        jobs = self._jobs(body, [body.dicts], options, variables=body.variables)
        return reply(model, self.tokens, body, jobs, call_tags=call_tags, channels=channels)

    def completion(self, body: CompletionBody) -> CompletionReply:
        """Prepare the reply to a completion. Raises InputError, ValueError or Refusal."""
        model, score_prompt = self.model(body.model), body.echo and body.logprob_count is not None
        encoding = {"raw": True, "parse_special": body.parse_special}
        jobs = self._jobs(body, body.prompts, {"score_prompt": score_prompt, "continues": True}, **encoding)
        return CompletionReply(model, self.tokens, body, jobs)

    def _jobs(self, body: GenerationBody, prompts: list, options: dict, **encoding) -> list[Job]:
        """Make a job for each choice of each prompt. Raises InputError or ValueError.

        options: arguments of `Engine.admit`. encoding: arguments of `encode`.
        """
        count, capacity, engine = len(prompts) * body.n, self.worker.capacity, self.worker.engine
        if count > capacity:  # check before encoding the prompts
            raise InputError(f"{count} outputs in one request; at most {capacity} can run or wait")
        samplings, jobs = body.samplings(min(self.max_tokens, self.max_seq_len)), []
        options = {"watch": body.return_speculation, "plain": not body.speculate, **options}
        for prompt in prompts:
            ids = encode(self.tokenizer, prompt, max_lengths=engine.max_lengths, **encoding)
            engine.check(ids, samplings[0])
            for sampling in samplings:  # compile each guide in this thread, as that takes time
                guide = engine.guide(sampling) if sampling.is_guided else None
                jobs.append(Job(ids, sampling, self.time_limit, {"guide": guide, **options}))
        return jobs

    async def respond(self, http: HttpRequest, body: GenerationBody, prepare: Callable) -> Response:
        """Send the reply that `prepare` makes from a body, complete or as a stream. Raises Refusal."""
        http.state.reply = reply = await in_thread(partial(prepare, body))
        if self.with_metrics or reply.body.return_speculation:
            reply.max_commit = self.worker.engine.runner.max_commit
        events, cancel = self._events(http, reply.jobs), partial(self.worker.cancel, *reply.jobs)
        if body.stream:
            return EventStream(_stream(reply, events, reply.body.stream_options.include_usage), cancel)
        try:
            async for _, event in events:
                if isinstance(event, Refusal):
                    raise event
        finally:
            cancel()
        if not all(job.finish for job in reply.jobs):  # the client has disconnected
            return Response(status_code=499)
        return JSONResponse(reply.whole())

    def _events(self, http: HttpRequest, jobs: list[Job]) -> AsyncIterator:
        """Submit jobs. Returns their events until all have ended or the client disconnects. Raises Refusal.

        Yields (index of the job, Event or Refusal), and (0, None) after each `PING_SECONDS` without an event.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def on_event(i: int, event: Event | Refusal) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, (i, event))

        async def stream_events():
            unfinished = len(jobs)
            while unfinished and not await http.is_disconnected():
                try:
                    i, event = await asyncio.wait_for(queue.get(), PING_SECONDS)
                except asyncio.TimeoutError:
                    yield 0, None
                    continue
                unfinished -= isinstance(event, Refusal) or event.finish is not None
                yield i, event

        for i, job in enumerate(jobs):
            job.on_event = partial(on_event, i)
        self.worker.submit(*jobs)
        return stream_events()


async def _stream(reply: Reply, events: AsyncIterator, with_usage: bool) -> AsyncIterator[str]:
    """Yield a reply as server-sent events."""
    def to_sse(data: dict) -> str:
        name = f"event: {data['type']}\n" if "type" in data else ""  # only in the Responses API
        return f"{name}data: {json.dumps(data, ensure_ascii=False, allow_nan=False).translate(LINE_ENDS)}\n\n"

    async for i, event in events:
        if event is None:
            yield ": keep-alive\n\n"
            continue
        if isinstance(event, Refusal):
            yield to_sse(reply.failed(event))
            break
        for chunk in reply.chunks(i, event):
            yield to_sse(chunk | ({"usage": None} if with_usage else {}))
    else:
        if with_usage:
            yield to_sse(reply.last_chunk())
    yield reply.end


class EventStream(StreamingResponse):
    """Server-sent events. close: called at the end, also if there were no events."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.close = close

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


async def in_thread(work: Callable):
    """Run slow work in a thread. Raises Refusal for an InputError, ValueError or RecursionError."""
    try:
        return await to_thread.run_sync(work)
    except ValueError as e:
        code = "context_length_exceeded" if isinstance(e, PromptTooLong) else None
        raise Refusal(400, str(e), code) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply", "invalid_value") from None


def make_app(
    server: Server, key: str | None = None, origins: Sequence[str] = (), max_body_bytes: int = 4 << 20,
    log: Callable[[str], None] | None = None,
) -> FastAPI:
    """Create the application.

    key: API key. origins: allowed CORS origins. max_body_bytes: maximum size of a request body. log: called
    with a line for every POST request and every error.
    """
    worker = server.worker
    app = FastAPI(title="EAGLE", redoc_url=None)
    app.add_middleware(Gate, key=key, max_body_bytes=max_body_bytes, open_paths=OPEN_PATHS, log=log)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    add_handlers(app)

    @app.post("/v1/chat/completions")
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(body: ChatBody, http: HttpRequest):
        return await server.respond(http, body, server.chat)

    @app.post("/v1/responses")
    @app.post("/responses", include_in_schema=False)
    async def responses(body: ResponsesBody, http: HttpRequest):
        return await server.respond(http, body, server.response)

    @app.post("/v1/completions")
    @app.post("/completions", include_in_schema=False)
    async def completions(body: CompletionBody, http: HttpRequest):
        return await server.respond(http, body, server.completion)

    def model_info(name: str) -> dict:
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "local",
            "max_model_len": server.max_seq_len, "speculation": worker.engine.runner.max_commit > 1,
            "method": worker.engine.drafter.method,
        }

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models():
        return {"object": "list", "data": [model_info(name) for name in server.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        return model_info(server.model(name))

    @app.get("/health")
    async def health():
        if worker.failed or worker.closing or not worker.is_alive():
            raise Refusal(503, worker.failed or SHUTTING_DOWN)
        return {"status": "ok", "running": worker.running, "waiting": worker.waiting}

    @app.get("/metrics")
    async def metrics():
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4")

    for path, name in FILES.items():
        app.add_route(path, partial(_file, name))
    add_tokenizer(app, server)
    return app


async def _file(name: str, http: HttpRequest) -> Response:
    return FileResponse(PAGE / name, headers={"Cache-Control": "no-cache"})


def add_tokenizer(app: FastAPI, server: Server) -> None:
    """Add the routes that only need the tokenizer."""
    tokenizer = server.tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody):
        def encode_body() -> list[int]:
            if body.messages is None:
                bos, parse_special = body.add_special_tokens, body.parse_special
                return tokenizer.encode(body.prompt, bos, parse_special=parse_special)
            return tokenizer.chat(body.dicts, **body.variables)

        ids = await in_thread(encode_body)
        return {"tokens": ids, "count": len(ids), "max_model_len": server.max_seq_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody):
        count = max(tokenizer.vocab_size, server.worker.engine.target.args.vocab_size)
        if (highest := max(body.tokens, default=0)) >= count:
            raise Refusal(400, f"tokens: {highest} is not a token id; ids are 0 to {count - 1}")
        return {"prompt": b"".join(map(tokenizer.piece_or_name, body.tokens)).decode("utf-8", "replace")}

    @app.get("/tokenizer_info")
    async def tokenizer_info():
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if token}
        return {"chat_template": tokenizer.template, **names}
