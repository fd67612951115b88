"""Servers and worker processes to measure: our server, llama.cpp's, OpenVINO GenAI, vLLM.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
from bench import ROOT, Contender, Decoded  # first: it makes the modules below importable

from common.errors import InputError
from tree import TreeShape

CONTEXT = 4096  # tokens of a text in llama-server
TIMEOUT = 600.0  # seconds that an answer may take
WORKER = Path(__file__).with_name("worker.py")


class PeerProcess:
    """A program that runs as long as its `with` statement. name: the option that errors blame.

    Its messages are kept for the error that it ends with. Raise InputError if it cannot be started.
    """

    def __init__(self, name: str, command: list[str], **pipes):
        self.name = name
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__
        try:
            pipes = {"stdout": self.messages, "stderr": self.messages, **pipes}
            self.process = subprocess.Popen(command, **pipes)
        except OSError as e:
            self.messages.close()
            raise InputError(f"{name} {command[0]}: cannot be started ({e.strerror})") from None

    def come_up(self) -> None:
        """Return when the program takes requests. Raise InputError if it ends before."""
        raise NotImplementedError

    def __enter__(self):
        try:
            self.come_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in filter(None, (self.process.stdin, self.process.stdout, self.messages)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def failed(self, what: str) -> InputError:
        """Return an error that quotes the last line that the program wrote."""
        self.messages.seek(0)
        lines = self.messages.read().decode(errors="replace").strip().split("\n")
        return InputError(f"{self.name}: {what} ({lines[-1].strip() or 'no message'})")


class HttpPeer(PeerProcess):
    """A program that serves HTTP on a free port of this machine, with /health."""

    def __init__(self, name: str, command: list[str]):
        with socket.socket() as any_free:
            any_free.bind(("127.0.0.1", 0))
            port = any_free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, [*command, "--host", "127.0.0.1", "--port", str(port)])

    def come_up(self) -> None:
        """Return when the model is loaded. Raise InputError if the program ends before."""
        while self.process.poll() is None:
            time.sleep(0.1)
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
        raise self.failed("ended")


def our_server(checkpoint: str, *options: str) -> HttpPeer:
    """Return serve.py of this checkpoint."""
    command = [sys.executable, str(ROOT / "serve.py"), "--checkpoint", checkpoint, *options]
    return HttpPeer("serve.py", command)


class LlamaServer(HttpPeer):
    """llama-server, of llama.cpp or ik_llama.cpp, with `parallel` slots. more: further options."""

    def __init__(self, binary: str, file: str, threads: int, *more: str, parallel: int = 1):
        command = [binary, "--model", file, "--ctx-size", str(CONTEXT * parallel), "--threads", str(threads)]
        super().__init__("--llama-server", [*command, "--parallel", str(parallel), *more])

    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt. The server keeps the time, from the first token to the last.

        It counts drafts behind a stop id as accepted, so that steps can be a few too few. ik_llama.cpp's
        returns no ids.
        """
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        try:
            url = f"{self.url}/completion"
            response = httpx.post(url, json={**body, "return_tokens": True}, timeout=TIMEOUT)
        except httpx.HTTPError:
            raise self.failed("gave no answer") from None
        if response.status_code != 200:
            raise self.failed(f"answered a prompt of {len(ids)} tokens with {response.status_code}")
        answer = response.json()
        timings = answer["timings"]
        later = timings["predicted_n"] - 1
        rate = 1000 * later / timings["predicted_ms"] if later else 0.0
        return Decoded(answer.get("tokens", []), rate, [], later - timings.get("draft_n_accepted", 0))


class Worker(PeerProcess):
    """OpenVINO GenAI or vLLM (program: "openvino", "vllm") with a model, driven by worker.py.

    python: the interpreter of an environment that has it. options: see worker.py.
    """

    def __init__(self, program: str, python: str, model: str, **options: object):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__(f"--{program}", [python, str(WORKER), program, model, json.dumps(options)], **pipes)

    def come_up(self) -> None:
        """Wait for the worker's first line."""
        self._answer()

    def _answer(self) -> dict:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise self.failed("ended")

    def contender(self, stop_ids: list[int], tree: TreeShape | None = None) -> Contender:
        """Return a contender that drafts a tree, of width 1 a chain; without one it decodes plainly.

        The clock runs in the process, from the first token to the last.
        """
        drafting = {"num_assistant_tokens": tree.nodes - 1} if tree else {}  # the root is no node there
        if tree and tree.width > 1:
            drafting |= {"tree_depth": tree.depth + 1, "branching_factor": tree.width}

        def decode(ids: list[int], tokens: int) -> Decoded:
            request = {"ids": ids, "tokens": tokens, "stop_ids": stop_ids, "drafting": drafting}
            try:
                print(json.dumps(request), file=self.process.stdin, flush=True)
            except BrokenPipeError:
                raise self.failed("ended") from None
            answer = self._answer()
            lengths = [len(step) for step in answer["steps"][1:]]
            new = [token for step in answer["steps"] for token in step]
            return Decoded(new, sum(lengths) / answer["seconds"] if lengths else 0.0, lengths)

        return decode


class Reply(NamedTuple):
    """A server's answer, as a client received it. Times in seconds, nan without a token to time."""

    text: str
    finish: str | None  # None: the client left before the end
    tokens: int  # completion tokens, as the server counts them
    first: float  # from the first try to the first text
    later: float  # from the first text to the last


async def ask(client: httpx.AsyncClient, body: dict, leave: int | None = None) -> Reply:
    """Ask for a chat completion, again after 429. leave: close the stream after this many events.

    Raise InputError if the server answers with an error, or not to the end.
    """
    start_time = time.perf_counter()
    if body.get("stream"):
        body = {**body, "stream_options": {"include_usage": True}}
    try:
        while (reply := await _ask_once(client, body, leave, start_time)) is None:
            await asyncio.sleep(0.5)
        return reply
    except httpx.HTTPError as e:
        raise InputError(f"no whole answer ({type(e).__name__}: {e})") from None


async def _ask_once(
    client: httpx.AsyncClient, body: dict, leave: int | None, start_time: float
) -> Reply | None:
    text, finish, tokens, first, last, events = "", None, 0, float("nan"), float("nan"), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code == 429:
            return None
        if response.status_code != 200:
            words = (await response.aread()).decode(errors="replace")
            raise InputError(f"status {response.status_code}: {words[:300]}")
        if not body.get("stream"):
            answer = json.loads(await response.aread())
            (choice,), used = answer["choices"], answer["usage"]["completion_tokens"]
            return Reply(choice["message"]["content"], choice["finish_reason"], used, first, last)
        async for line in response.aiter_lines():
            if leave is not None and events >= leave:
                return Reply(text, None, 0, first - start_time, last - first)
            if not line.startswith("data: {"):
                continue
            events, event = events + 1, json.loads(line[6:])
            if "error" in event:
                raise InputError(f"an error in a stream: {event['error']['message']}")
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                finish = choice.get("finish_reason") or finish
                if piece := choice["delta"].get("content"):
                    text, last = text + piece, time.perf_counter()
                    first = last if first != first else first
    if finish is None:
        raise InputError("a stream ended without a finish reason")
    return Reply(text, finish, tokens, first - start_time, last - first)
