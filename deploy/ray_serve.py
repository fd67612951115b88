"""Replicas of the server behind Ray Serve: more processes, more machines.

    pip install "ray[serve]" httpx
    CHECKPOINT=checkpoints/smollm2-135m OPTIONS="--speculate eagle3" serve run deploy.ray_serve:app

Each replica is a `serve.py` of its own on a free local port. Ray decides how many there are, by how many
requests each has, and sends each request to one. A request whose replica dies before it has answered anything
is sent to another one.
"""

import asyncio
import json
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
from fastapi.responses import Response, StreamingResponse
from ray import serve

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = os.environ.get("CHECKPOINT", str(ROOT / "checkpoints" / "smollm2-135m"))
OPTIONS = os.environ.get("OPTIONS", "--speculate eagle3")
REPLICAS = os.environ.get("REPLICAS", "1,4").split(",")  # at least, at most
ONGOING = int(os.environ.get("ONGOING", "4"))  # requests of a replica, beyond which there are to be more
CPUS, GPUS = float(os.environ.get("CPUS", "1")), float(os.environ.get("GPUS", "0"))
TRIES = 5
# Headers, in and out.
CORS = ("access-control-request-method", "access-control-request-headers", "origin")
KEPT, TOLD = ("content-type", "authorization", *CORS), ("content-type", "retry-after", "allow", "vary")

front = FastAPI()


@serve.deployment(
    max_ongoing_requests=64, ray_actor_options={"num_cpus": CPUS, "num_gpus": GPUS}, health_check_period_s=2,
    autoscaling_config={
        "min_replicas": int(REPLICAS[0]), "max_replicas": int(REPLICAS[-1]),
        "target_ongoing_requests": ONGOING,
    },
)
class Replica:
    """One server."""

    def __init__(self):
        command = [sys.executable, str(ROOT / "serve.py"), "--checkpoint", CHECKPOINT, "--port", "0"]
        self.process = subprocess.Popen(
            command + shlex.split(OPTIONS), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        said: deque[str] = deque(maxlen=20)
        self.url = ""
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"ready .*(http://\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise RuntimeError(f"the server did not start: {''.join(said)}")
        self.leaving = False
        threading.Thread(target=self.repeat, daemon=True).start()
        self.client = httpx.AsyncClient(base_url=self.url, timeout=None)

    def repeat(self) -> None:
        """What the server says goes into the replica's log. When it ends, so does the replica: Ray then sends
        nobody here any more, and starts another.
        """
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr)
        if not self.leaving:
            os._exit(1)

    async def ask(self, method: str, path: str, headers: dict, body: bytes):
        """What the server answers: first (status, headers), then pieces of the body."""
        async with self.client.stream(method, path, headers=headers, content=body) as answer:
            headers = answer.headers.items()
            yield answer.status_code, {
                k: v for k, v in headers if k in TOLD or k.startswith("access-control-")
            }
            async for piece in answer.aiter_raw():
                yield piece

    def __del__(self):  # called when Ray wants fewer replicas
        self.leaving = True
        self.process.terminate()
        self.process.wait()


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(front)
class Front:
    """What clients speak to."""

    def __init__(self, replicas):
        self.replicas = replicas.options(stream=True)

    @front.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
    async def any(self, request: Request, path: str) -> Response:
        """The answer of some replica; of another one, if that has gone before it answered."""
        headers = {k: v for k, v in request.headers.items() if k in KEPT}
        asked = request.method, f"/{path}", headers, await request.body()
        for tries in range(TRIES):
            pieces = self.replicas.ask.remote(*asked)
            try:
                status, kept = await anext(pieces)
                first = await anext(pieces, b"")
                if status == 503 and tries < TRIES - 1:  # it is going down, or decodes no more
                    await asyncio.sleep(0.5 * (tries + 1))
                    continue
                break
            except Exception as e:  # whatever a replica dies of: nothing has been answered yet
                if tries == TRIES - 1:
                    words = {"message": f"no replica answers ({type(e).__name__})", "type": "server_error"}
                    return Response(content=json.dumps({"error": words}), status_code=503)
                await asyncio.sleep(0.5 * (tries + 1))

        async def rest():
            yield first
            async for piece in pieces:
                yield piece

        return StreamingResponse(rest(), status, kept)


app = Front.bind(Replica.bind())
