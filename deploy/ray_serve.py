"""Replicate the server with Ray Serve, over processes and machines.

    pip install "ray[serve]" httpx
    CHECKPOINT=checkpoints/smollm2-135m OPTIONS="--speculate eagle3" serve run deploy.ray_serve:app

Each replica is a `serve.py` on a free local port. Ray routes requests, and scales the replicas with their
number. If a replica dies before the first byte of its response, the request goes to another one.
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
REPLICAS = os.environ.get("REPLICAS", "1,4").split(",")  # minimum, maximum
ONGOING = int(os.environ.get("ONGOING", "4"))  # target number of ongoing requests per replica
CPUS, GPUS = float(os.environ.get("CPUS", "1")), float(os.environ.get("GPUS", "0"))
MAX_ATTEMPTS = 5
# Headers that are forwarded.
CORS = ("access-control-request-method", "access-control-request-headers", "origin")
REQUEST_HEADERS = "content-type", "authorization", *CORS
RESPONSE_HEADERS = "content-type", "retry-after", "allow", "vary"

front = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)  # the replicas serve these pages


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
        self.stopping = False
        threading.Thread(target=self.forward_logs, daemon=True).start()
        self.client = httpx.AsyncClient(base_url=found[1], timeout=None)

    def forward_logs(self) -> None:
        """Copy the server's log to the replica's. When the server ends, end the replica: Ray replaces it."""
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr)
        if not self.stopping:
            os._exit(1)

    async def ask(self, method: str, path: str, headers: dict, body: bytes):
        """Yield (status, headers) of the server's response, then the chunks of its body."""
        async with self.client.stream(method, path, headers=headers, content=body) as answer:
            items = answer.headers.items()
            headers_out = {k: v for k, v in items if k in RESPONSE_HEADERS or k.startswith("access-control-")}
            yield answer.status_code, headers_out
            async for piece in answer.aiter_raw():
                yield piece

    def __del__(self):  # Ray scales down
        self.stopping = True
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
        """Return a replica's response, and retry with another replica if it fails before the first byte."""
        headers = {k: v for k, v in request.headers.items() if k in REQUEST_HEADERS}
        request_parts = request.method, f"/{path}", headers, await request.body()
        for attempt in range(MAX_ATTEMPTS):
            pieces = self.replicas.ask.remote(*request_parts)
            try:
                status, headers_out = await anext(pieces)
                first = await anext(pieces, b"")
                if status == 503 and attempt < MAX_ATTEMPTS - 1:  # shutting down, or its engine failed
                    await asyncio.sleep(0.5 * (attempt + 1))
                    continue
                break
            except Exception as e:  # any failure of the replica: no response was sent yet
                if attempt == MAX_ATTEMPTS - 1:
                    error = {"message": f"no replica answers ({type(e).__name__})", "type": "server_error"}
                    return JSONResponse({"error": error}, 503)
                await asyncio.sleep(0.5 * (attempt + 1))

        async def rest():
            yield first
            async for piece in pieces:
                yield piece

        return StreamingResponse(rest(), status, headers_out)


app = Front.bind(Replica.bind())
