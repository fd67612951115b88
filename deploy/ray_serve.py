"""Replicas of the server behind Ray Serve: more processes, more machines.

    pip install "ray[serve]" httpx
    CHECKPOINT=checkpoints/smollm2-135m OPTIONS="--speculate eagle3" serve run deploy.ray_serve:app

Each replica is a `serve.py` of its own on a free local port. Ray chooses their number by the requests that
each has, and a replica for each request. A request whose replica dies before the first byte of the answer
goes to another one.
"""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = os.environ.get("CHECKPOINT", str(ROOT / "checkpoints" / "smollm2-135m"))
OPTIONS = os.environ.get("OPTIONS", "--speculate eagle3")
REPLICAS = os.environ.get("REPLICAS", "1,4").split(",")  # at least, at most
ONGOING = int(os.environ.get("ONGOING", "4"))  # requests of a replica, above which Ray starts another
CPUS, GPUS = float(os.environ.get("CPUS", "1")), float(os.environ.get("GPUS", "0"))
TRIES = 5
# Headers that requests and answers keep.
CORS = ("access-control-request-method", "access-control-request-headers", "origin")
ASKED, ANSWERED = ("content-type", "authorization", *CORS), ("content-type", "retry-after", "allow", "vary")

front = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # replicas have these pages


@serve.deployment(
    max_ongoing_requests=64, ray_actor_options={"num_cpus": CPUS, "num_gpus": GPUS}, health_check_period_s=2,
    autoscaling_config={
        "min_replicas": int(REPLICAS[0]), "max_replicas": int(REPLICAS[-1]),
        "target_ongoing_requests": ONGOING,
    },
)
class Replica:
    """A server process."""

    def __init__(self):
        command = [sys.executable, str(ROOT / "serve.py"), "--checkpoint", CHECKPOINT, "--port", "0"]
        self.process = subprocess.Popen(
            command + shlex.split(OPTIONS), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        lines: deque[str] = deque(maxlen=20)
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"ready .*(http://\S+)", line):
                break
        else:
            raise RuntimeError(f"the server did not start: {''.join(lines)}")
        self.leaving = False
        threading.Thread(target=self.repeat, daemon=True).start()
        self.client = httpx.AsyncClient(base_url=found[1], timeout=None)

    def repeat(self) -> None:
        """Copy the server's messages to the replica's log. End the replica with its server.

        Ray then starts another one.
        """
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr)
        if not self.leaving:
            os._exit(1)

    async def ask(self, method: str, path: str, headers: dict, body: bytes):
        """Yield (status, headers) of the server's answer, then the pieces of its body."""
        async with self.client.stream(method, path, headers=headers, content=body) as answer:
            items = answer.headers.items()
            kept = {k: v for k, v in items if k in ANSWERED or k.startswith("access-control-")}
            yield answer.status_code, kept
            async for piece in answer.aiter_raw():
                yield piece

    def __del__(self):  # called when Ray wants fewer replicas
        self.leaving = True
        self.process.terminate()
        self.process.wait()


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(front)
class Front:
    """The HTTP front of all replicas."""

    def __init__(self, replicas):
        self.replicas = replicas.options(stream=True)

    @front.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "OPTIONS"])
    async def any(self, request: Request, path: str) -> Response:
        """Return a replica's answer; another one's, if that replica ends before it answers."""
        headers = {k: v for k, v in request.headers.items() if k in ASKED}
        asked = request.method, f"/{path}", headers, await request.body()
        for tries in range(TRIES):
            pieces = self.replicas.ask.remote(*asked)
            try:
                status, kept = await anext(pieces)
                first = await anext(pieces, b"")
                if status == 503 and tries < TRIES - 1:  # it is ending, or its decoder has failed
                    await asyncio.sleep(0.5 * (tries + 1))
                    continue
                break
            except Exception as e:  # whatever ended the replica: nothing has been answered yet
                if tries == TRIES - 1:
                    error = {"message": f"no replica answers ({type(e).__name__})", "type": "server_error"}
                    return JSONResponse({"error": error}, 503)
                await asyncio.sleep(0.5 * (tries + 1))

        async def rest():
            yield first
            async for piece in pieces:
                yield piece

        return StreamingResponse(rest(), status, kept)


app = Front.bind(Replica.bind())
