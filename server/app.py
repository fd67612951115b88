"""The HTTP side: routes, errors, limits, streams. Nothing here touches the model; see `server.worker`."""
from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware

from common.errors import InputError, printable
from engine.text_decoder import encode
from sampling.options import Sampling
from server.answers import Answer, ChatAnswer, TextAnswer, Tokens
from server.metrics import Metrics
from server.refusals import Gate, Refusal, add_handlers, refusal_of
from server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    TokenizeRequest,
)
from server.tools import as_dict, form_of
from server.worker import Closing, Delta, Job, QueueFull, Worker
from tokens.grammar import Guide
from tokens.schema import ANY_OBJECT
from tokens.tokenizer import Tokenizer, TooLong

PAGE = Path(__file__).parent / "page"
SCRIPT = "text/javascript"
FILES = {"page.js": SCRIPT, "markdown.js": SCRIPT, "tree.js": SCRIPT, "page.css": "text/css"}
RESERVED = {"messages", "tools", "self", "at_most"}  # variables of templates that have fields of their own
QUIET = 15.0  # seconds after which a stream without news says that it is alive
OPEN = ("/health", "/metrics", "/", *(f"/{name}" for name in FILES))  # without a key, as in vLLM


@dataclass(frozen=True)
class Settings:
    """How a server behaves. models: the names that it answers to, its own first."""

    models: tuple[str, ...]
    max_seq_len: int
    api_key: str | None = None
    origins: tuple[str, ...] = ()  # of pages that may call it from a browser
    most_bytes: int = 4 << 20  # of a request
    seconds: float = 600.0  # that a request may take


class Server:
    """What the routes share. grammar: makes a guide of a JSON schema."""

    def __init__(
        self, worker: Worker, metrics: Metrics, tokenizer: Tokenizer, settings: Settings,
        grammar: Callable[[str], Guide],
    ):
        self.worker, self.metrics, self.tokenizer, self.settings = worker, metrics, tokenizer, settings
        self.grammar, self.tokens = grammar, Tokens(tokenizer)

    # -- from a request to jobs ---------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The name of the model that is asked for. Raises Refusal if it is another one."""
        if name is not None and name not in self.settings.models:
            known = ", ".join(self.settings.models)
            words = f"there is no model {printable(name)!r} here; there is {known}"
            raise Refusal(404, words, "model_not_found", "model")
        return name or self.settings.models[0]

    async def prepare(self, work: Callable):
        """What `work` returns, which takes its time, beside the others. Raises Refusal on bad input."""
        try:
            return await to_thread.run_sync(work)
        except TooLong as e:
            raise Refusal(400, str(e), "context_length_exceeded") from None
        except (InputError, ValueError) as e:
            raise Refusal(400, str(e)) from None

    def check_room(self, request, prompts: int) -> None:
        """Refuse more choices than there are ever places for, before anything is read. Raises InputError."""
        choices = prompts * (request.n or 1)
        if choices > self.worker.most:
            raise InputError(
                f"{choices} outputs are asked for at once, at most {self.worker.most} run or wait here:"
                " send fewer prompts at a time, or start the server with a larger --queue"
            )

    def schema(self, form: ResponseFormat | None) -> str | None:
        """The JSON schema that a response is to fit, which has not been judged yet. Raises InputError."""
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return ANY_OBJECT
        if form.json_schema is None or form.json_schema.definition is None:
            raise InputError("response_format: json_schema needs a schema")
        return json.dumps(form.json_schema.definition)

    def jobs(self, request, prompts: list[list[int]], most: int, logprobs: int | None, **more) -> list[Job]:
        """A job for each choice of each prompt. Raises InputError or ValueError."""
        schema = self.schema(request.response_format)
        seed = request.new_seed()

        def job(prompt: list[int], choice: int) -> Job:
            sampling: Sampling = request.sampling(choice, most, seed, logprobs, schema)
            return Job(
                prompt, sampling, lambda delta: None, guide=schema and self.grammar(schema),
                seconds=self.settings.seconds, watch=bool(request.return_speculation),
                plain=request.speculate is False, **more,
            )

        return [job(prompt, choice) for prompt in prompts for choice in range(request.n or 1)]

    # -- from jobs to a response --------------------------------------------------------------

    async def respond(self, http: Request, request, answer: Answer) -> Response:
        """The answer, whole or as a stream. Raises Refusal if its jobs are not taken, or fail."""
        news = self.submit(answer.jobs)
        if request.stream:
            usage = bool(request.stream_options and request.stream_options.include_usage)
            events = self.events(answer, self.deltas(http, answer.jobs, news), usage)
            return Stream(events, partial(self.worker.cancel, *answer.jobs))
        try:
            async for i, delta in self.deltas(http, answer.jobs, news):
                if delta is None:
                    continue
                if delta.failure:
                    raise refusal_of(delta.failure)
                answer.take(i, delta)
        finally:
            self.worker.cancel(*answer.jobs)
        return JSONResponse(answer.whole())

    def submit(self, jobs: list[Job]) -> asyncio.Queue:
        """Hand jobs to the worker; what they gain comes as (job, delta). Raises Refusal."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue()
        for i, job in enumerate(jobs):
            job.deliver = partial(_tell, loop, news, i)
        try:
            self.worker.submit(*jobs)
        except QueueFull as e:
            raise Refusal(429, str(e), "queue_full") from None
        except Closing as e:
            raise Refusal(503, str(e), "closing") from None
        except ValueError as e:
            raise Refusal(400, str(e), "context_length_exceeded" if "room" in str(e) else None) from None
        return news

    async def deltas(
        self, http: Request, jobs: list[Job], news: asyncio.Queue
    ) -> AsyncIterator[tuple[int, Delta | None]]:
        """What the jobs gain, until all have ended or the client has gone: (job, delta), and (0, None) when
        nothing came for long.
        """
        gone, running = asyncio.create_task(_gone(http)), len(jobs)
        found = asyncio.create_task(news.get())
        try:
            while running:
                done, _ = await asyncio.wait((found, gone), timeout=QUIET, return_when="FIRST_COMPLETED")
                if gone in done:
                    return
                if found not in done:
                    yield 0, None
                    continue
                i, delta = found.result()
                running -= delta.finish is not None
                found = asyncio.create_task(news.get())
                yield i, delta
        finally:
            gone.cancel()
            found.cancel()

    async def events(self, answer: Answer, deltas: AsyncIterator, usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        async for i, delta in deltas:
            if delta is None:
                yield ": still here\n\n"
                continue
            if delta.failure:
                yield _event(refusal_of(delta.failure).body())
                break
            for chunk in answer.chunk(i, delta):
                yield _event(chunk | ({"usage": None} if usage else {}))
        else:
            if usage:
                yield _event(answer.last_chunk())
        yield "data: [DONE]\n\n"


class Stream(StreamingResponse):
    """Server-sent events. leave: called at the end, however it comes, even before the first event."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.leave = leave

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Queue, i: int, delta: Delta) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(news.put_nowait, (i, delta))


async def _gone(http: Request) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"


def make_app(server: Server) -> FastAPI:
    """The application."""
    settings, tokenizer = server.settings, server.tokenizer
    app = FastAPI(title="EAGLE", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, key=settings.api_key, most_bytes=settings.most_bytes, open_to_all=OPEN)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"]
        )

    add_handlers(app)

    @app.post("/v1/chat/completions")
    @app.post("/chat/completions", include_in_schema=False)
    async def chat(request: ChatRequest, http: Request):
        model = server.check_model(request.model)
        if request.tool_choice not in (None, "auto", "none"):
            raise Refusal(
                400, f"tool_choice {json.dumps(request.tool_choice):.200}: only auto and none are known here",
                param="tool_choice",
            )
        tools = request.tools if request.tool_choice != "none" else None
        scored = bool(request.logprobs) or request.top_logprobs is not None

        def work() -> tuple[list[Job], str | None]:
            form = form_of(tokenizer.template) if tools else None
            variables = dict(request.chat_template_kwargs or {})
            if taken := RESERVED & variables.keys():
                raise InputError(f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set there")
            if tools:
                variables["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
            if not tokenizer.has_template:
                raise InputError("this checkpoint has no chat template: use /v1/completions")
            server.check_room(request, 1)
            messages = [as_dict(message) for message in request.messages]
            prompt = encode(tokenizer, messages, room=settings.max_seq_len, variables=variables)
            most = request.max_completion_tokens or request.max_tokens or settings.max_seq_len
            return server.jobs(request, [prompt], most, (request.top_logprobs or 0) if scored else None), form

        jobs, form = await server.prepare(work)
        answer = ChatAnswer(
            model, server.tokens, jobs, request, form=form, scored=scored
        )
        return await server.respond(http, request, answer)

    @app.post("/v1/completions")
    @app.post("/completions", include_in_schema=False)
    async def completions(request: CompletionRequest, http: Request):
        model = server.check_model(request.model)
        if request.suffix:
            raise Refusal(400, "suffix: text cannot be filled in here; leave it out", param="suffix")
        scored = request.logprobs is not None
        most = 16 if request.max_tokens is None else request.max_tokens
        if most == 0 and not request.echo:
            raise Refusal(400, "max_tokens: 0 is only of use with echo", param="max_tokens")

        def work() -> tuple[list[Job], list[str] | None]:
            given = request.prompt
            if isinstance(given, str) or (given and isinstance(given[0], int)):
                given = [given]
            server.check_room(request, len(given))
            prompts = [encode(tokenizer, prompt, raw=True, room=settings.max_seq_len) for prompt in given]
            if not prompts:
                raise InputError("prompt: there is none")
            jobs = server.jobs(
                request, prompts, most, request.logprobs, score_prompt=bool(request.echo and scored)
            )
            return jobs, [tokenizer.decode(job.prompt) for job in jobs] if request.echo else None

        jobs, echoes = await server.prepare(work)
        answer = TextAnswer(
            model, server.tokens, jobs, request, prompts=echoes, scored=scored, wanted=most > 0
        )
        return await server.respond(http, request, answer)

    def described(name: str) -> dict:
        return {
            "id": name, "object": "model", "created": 0, "owned_by": "local",
            "max_model_len": settings.max_seq_len,
        }

    @app.get("/v1/models")
    @app.get("/models", include_in_schema=False)
    async def models():
        return {"object": "list", "data": [described(name) for name in settings.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        return described(server.check_model(name))

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest):
        def work() -> list[int]:
            if (request.prompt is None) == (request.messages is None):
                raise InputError("give prompt or messages")
            if request.messages is not None:
                return tokenizer.chat([as_dict(message) for message in request.messages])
            return tokenizer.encode(request.prompt, bos=request.add_special_tokens is not False)

        ids = await server.prepare(work)
        return {"tokens": ids, "count": len(ids), "max_model_len": settings.max_seq_len}

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest):
        def work() -> str:
            if (most := max(request.tokens, default=0)) >= tokenizer.vocab_size:
                raise InputError(f"tokens: {most} is no token, there are 0 to {tokenizer.vocab_size - 1}")
            return b"".join(map(server.tokens.bytes_of, request.tokens)).decode("utf-8", "replace")

        return {"prompt": await server.prepare(work)}

    @app.get("/tokenizer_info")
    async def tokenizer_info():
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if token}
        return {"chat_template": tokenizer.template, **names}

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health():
        if server.worker.failed or not server.worker.is_alive():
            raise Refusal(503, server.worker.failed or "the decoding thread has ended")
        return {"status": "ok", "running": server.worker.running, "waiting": server.worker.waiting}

    @app.get("/metrics")
    async def metrics():
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page():
        return FileResponse(PAGE / "page.html", headers={"Cache-Control": "no-cache"})

    for name, kind in FILES.items():
        app.add_api_route(
            f"/{name}", partial(_file, name, kind), include_in_schema=False, response_class=FileResponse
        )
    return app


async def _file(name: str, kind: str) -> FileResponse:
    return FileResponse(PAGE / name, media_type=kind, headers={"Cache-Control": "no-cache"})
