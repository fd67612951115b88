"""Two replicas behind Ray Serve, one of which is killed under load. Needs the package ray[serve]."""
import concurrent.futures
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import ROOT

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.dear
START = 240.0  # seconds at most
CLIENTS, ASKED = 8, 120
RUN = """
import sys, time
from ray import serve
from deploy.ray_serve import app
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(app)
print("running", flush=True)
sys.stdin.read()
serve.shutdown()
"""


def servers(checkpoint: Path) -> list[int]:
    """The processes that serve this checkpoint."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0") if folder.name.isdigit() else []
        except OSError:  # it has ended
            continue
        if str(ROOT / "serve.py") in words and str(checkpoint) in words:
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def url(golden, tmp_path_factory):
    """Two replicas of the golden target."""
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    options = "--speculate eagle3 --tree 16,3,4 --no-compile --threads 1 --slots 2 --max-seq-len 400"
    settings = {
        "CHECKPOINT": str(golden), "OPTIONS": options, "REPLICAS": "2,2", "CPUS": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    log = tmp_path_factory.mktemp("ray") / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(port)], cwd=ROOT, env={**os.environ, **settings}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
        )
        timer = threading.Timer(START, process.kill)
        timer.start()
        assert process.stdout.readline() == "running\n", log.read_text()[-2000:]
        timer.cancel()
        yield f"http://127.0.0.1:{port}"
        process.stdin.close()
        process.wait(60)


def body(seed: int, stream: bool) -> dict:
    """A request with a text of its own."""
    return {
        "messages": [{"role": "user", "content": f"tell me something about {seed}"}], "seed": seed,
        "temperature": 0.8, "max_tokens": 20 + seed % 60, "stream": stream,
    }


def whole(url: str, seed: int) -> str:
    """The text of an answer in one piece."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(seed, False), timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def streamed(url: str, seed: int) -> tuple[str, bool, bool]:
    """The text of a stream, whether it began, and whether it came to its end."""
    text, began, ended = "", False, False
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body(seed, True), timeout=120) as events:
            assert events.status_code == 200, events.read()
            for line in events.iter_lines():
                began = began or line.startswith("data")
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    except httpx.RemoteProtocolError:
        pass
    return text, began, ended


def test_no_request_is_lost_that_had_not_begun(url, golden):
    alone = [whole(url, seed) for seed in range(30)]
    before = servers(golden)
    assert len(before) == 2
    chance = random.Random(0)
    asked = [(chance.randrange(30), chance.random() < 0.5) for _ in range(ASKED)]
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(streamed if stream else whole, url, seed) for seed, stream in asked]
        while sum(answer.done() for answer in answers) < ASKED // 4:
            time.sleep(0.01)
        os.kill(before[0], signal.SIGKILL)
        broken = 0
        for (seed, stream), answer in zip(asked, answers):
            if not stream:
                assert answer.result() == alone[seed]
                continue
            text, began, ended = answer.result()
            assert ended or began, "a stream that had not begun was lost"
            assert (text == alone[seed]) if ended else alone[seed].startswith(text)
            broken += not ended
    assert broken <= 2  # as many as the dead one had places
    end = time.monotonic() + START
    while len(now := servers(golden)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(now) == 2 and before[0] not in now  # another one has taken its place


def test_a_client_that_goes_frees_its_place(url):
    request = {**body(1, True), "max_tokens": 300, "logit_bias": {"257": -100}}
    for _ in range(6):  # more than there are places
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=60) as events:
            next(events.iter_lines())
    assert whole(url, 2)
    for _ in range(10):  # either replica answers
        end = time.monotonic() + 20
        while httpx.get(f"{url}/health").json()["running"] and time.monotonic() < end:
            time.sleep(0.05)
        assert httpx.get(f"{url}/health").json()["running"] == 0
