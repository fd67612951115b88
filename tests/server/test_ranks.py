"""A server on two ranks answers as one process does, whatever comes and goes, and ends in order."""
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.serving import serving

import serve
from sampling.options import Sampling
from server.metrics import Metrics
from server.worker import Closing, Job, Worker
from tokens.tokenizer import Tokenizer

httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.slow
OPTIONS = (
    "--speculate", "eagle3", "--tree", "8,2,3", "--slots", "3", "--max-seq-len", "300", "--dtype", "fp32"
)
ENDLESS = {
    "messages": [{"role": "user", "content": "x"}], "max_tokens": 280, "stream": True,
    "logit_bias": {"257": -100},
}
ASKED = [
    {"seed": 1, "max_tokens": 40}, {"seed": 2, "temperature": 1.0, "max_tokens": 30},
    {"seed": 3, "temperature": 0.8, "top_p": 0.9, "max_tokens": 50}, {"seed": 4, "max_tokens": 1},
    {"seed": 5, "max_tokens": 24, "response_format": {"type": "json_object"}},
    {"seed": 6, "max_tokens": 60, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
]


def ask(server, i: int, body: dict) -> str:
    messages = [{"role": "user", "content": f"tell me something about {i}"}]
    body = {"messages": messages, "temperature": 0, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    return answer["choices"][0]["message"]["content"]


def answers(server) -> list[str]:
    """All at once, on three places, while a client asks for much, reads a little and goes."""
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        waiting = [pool.submit(ask, server, i, body) for i, body in enumerate(ASKED)]
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=ENDLESS, timeout=60) as stream:
            for _ in zip(range(5), stream.iter_lines()):
                pass
        return [one.result() for one in waiting]


def test_answers_are_those_of_one_process(golden, tmp_path):
    with serving(golden, tmp_path / "one", *OPTIONS) as server:
        want = answers(server)
    with serving(golden, tmp_path / "two", *OPTIONS, ranks=2) as server:
        assert answers(server) == want and answers(server) == want
        bad = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 99999], "max_tokens": 4})
        assert bad.status_code == 400 and ask(server, 0, ASKED[0]) == want[0]
        server.end()
        said = server.said()
    assert "2 ranks: each holds" in said and said.count("ready ") == 1 and "error: " not in said
    assert "going down: requests that run are ended first" in said


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_dies_ends_the_server(golden, tmp_path, busy):
    with serving(golden, tmp_path / "log", *OPTIONS, ranks=2) as server:
        pid = server.process.pid
        ranks = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        follower = next(
            pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        with contextlib.ExitStack() as stack:
            lines = iter(())
            if busy:
                url = f"{server.url}/v1/chat/completions"
                lines = stack.enter_context(httpx.stream("POST", url, json=ENDLESS, timeout=60)).iter_lines()
                next(lines)
            os.kill(follower, signal.SIGKILL)
            began, heard = time.monotonic(), [line for line in lines if line.startswith("data: ")]
        assert server.process.wait(60) != 0 and time.monotonic() - began < 15
        if busy:  # whoever waits for an answer hears why there is none
            assert heard[-1] == "data: [DONE]" and "the server is going down: " in heard[-2]
        said = server.said()
        assert said.count("error: rank 0 of 2 has lost another one") == 1 and "decoding failed" not in said
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize("ranks, seconds", [("1", 30), ("2", 20)])
def test_requests_end_before_torchrun_kills(monkeypatch, ranks, seconds):
    """It does so 30 seconds after it has told its processes to end."""
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert serve.parser().parse_args(["--checkpoint", "one"]).grace == seconds


class Waiting:
    """Seats whose step waits for ever for another rank, as some do."""

    batch, state = 1, SimpleNamespace(stop_ids=torch.tensor([2]))

    def __init__(self):
        self.free, self.busy, self.waits = 1, 0, threading.Event()

    def check(self, _):
        pass

    check_request = check

    def admit(self, *_):
        self.free, self.busy = 0, 1
        return type("Text", (), {"cached": 0})()

    def advance(self):
        self.waits.set()
        threading.Event().wait()


def test_nobody_waits_for_a_rank_that_is_lost(golden):
    worker, heard = Worker(Waiting(), Tokenizer.load(golden), Metrics("x", 1, 1)), []
    worker.start()
    worker.submit(Job([1], Sampling(4), heard.append))
    assert worker.seats.waits.wait(30)
    worker.abandon()
    assert not heard  # nothing is lost yet
    worker.lost = lambda: True
    worker.abandon()
    assert heard[-1].failure.fault == "closing" and "what decodes is lost" in heard[-1].failure.why
    with pytest.raises(Closing, match="what decodes is lost"):
        worker.submit(Job([1], Sampling(4), heard.append))
    assert len(heard) == 1
