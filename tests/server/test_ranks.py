"""A server on two ranks answers as one process does, and ends in order."""
import concurrent.futures
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.serving import serving

pytestmark = pytest.mark.slow
OPTIONS = (
    "--speculate", "eagle3", "--tree", "8,2,3", "--slots", "3", "--max-seq-len", "300", "--dtype", "fp32"
)
ENDLESS = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 280, "logit_bias": {"257": -100}}
BODIES = [
    {"seed": 1, "max_tokens": 40}, {"seed": 2, "temperature": 1.0, "max_tokens": 30},
    {"seed": 3, "temperature": 0.8, "top_p": 0.9, "max_tokens": 50, "stop": ["e"]},
    {"seed": 4, "max_tokens": 1}, {"seed": 5, "max_tokens": 24, "response_format": {"type": "json_object"}},
    {"seed": 6, "max_tokens": 60, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
]


def answers(server) -> list[str]:
    """All at once, on three places, while another client reads a little of a long text and goes."""
    def ask(i: int) -> str:
        messages = [{"role": "user", "content": f"tell me something about {i}"}]
        answer = server.post(**{"messages": messages, "temperature": 0, **BODIES[i]}).json()
        return answer["choices"][0]["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(7) as pool, server.stream(**ENDLESS) as events:
        found = pool.map(ask, range(len(BODIES)))
        next(events)
    return [*found]


def test_answers_are_those_of_one_process(golden, tmp_path):
    with serving(golden, tmp_path / "one", *OPTIONS) as server:
        want = answers(server)
    with serving(golden, tmp_path / "two", *OPTIONS, ranks=2) as server:
        bad = server.post("/v1/completions", prompt=[1, 99999], max_tokens=4)
        assert bad.status_code == 400 and answers(server) == want and answers(server) == want
        server.end()
        printed = server.printed()
    assert "2 ranks: each has" in printed and printed.count("ready ") == 1 and "error: " not in printed
    assert "shutting down: finishing running requests" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_a_rank_that_dies_ends_the_server(golden, tmp_path):
    """A client that waits for an answer gets the reason why there is none."""
    with serving(golden, tmp_path / "log", *OPTIONS, ranks=2) as server:
        pid = server.process.pid
        ranks = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        (follower,) = (x for x in ranks if b"\0RANK=1\0" in Path(f"/proc/{x}/environ").read_bytes())
        with server.stream(**ENDLESS) as events:
            next(events)
            os.kill(follower, signal.SIGKILL)
            *_, reason, end = events
        assert end == "[DONE]" and "the server is shutting down: " in reason
        assert server.process.wait(60) != 0  # long before a collective would time out
        printed = server.printed()
        assert printed.count("error: rank 0 of 2 has lost another one") == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
