"""Soak test of the server: lost or wrong answers under load, growth of memory and open files.

    python benchmarks/soak.py --checkpoint DIR --questions question.jsonl --clients 32 --minutes 10

There are --requests different requests: short and long prompts, several turns, all sampling options, stop
strings, JSON, with and without drafting and streaming. The server first answers each request alone. Then the
clients repeat them; one in seven streams is closed early. Every complete answer must equal the first one in
text, finish reason and number of tokens. Memory and open files must not grow after the first tenth of the
run. Writes benchmarks/results/NAME.json. The exit status is 1 after any error.
"""
from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
import time
from pathlib import Path

import bench  # first: it makes the modules below importable
import httpx
from bench import positive
from processes import TIMEOUT, HttpPeer, Reply, ask, our_server

from common.cli import log_stderr
from common.errors import InputError
from tokens.dataset import read_prompts

SCHEMA = {
    "type": "object", "required": ["answer", "sure"], "additionalProperties": False,
    "properties": {"answer": {"type": "string", "maxLength": 40}, "sure": {"type": "boolean"}},
}
SAMPLING_OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.05},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0.8, "repetition_penalty": 1.15},
    {"temperature": 0, "stop": [". ", "\n\n"]},
    {"temperature": 0.7, "speculate": False},
    {"temperature": 0, "logit_bias": {"284": -100, "198": 1.5}},
    {"temperature": 0.5, "response_format": {
        "type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}},
]
MAX_TOKENS = (1, 4, 12, 30, 60, 100, 160)
DISCONNECT_ONE_IN = 7  # streams whose client disconnects: one in 7
SAMPLE_INTERVAL = 5.0  # seconds between samples of memory and open files
MAX_MEMORY_GROWTH = 64e6  # in bytes; allocators keep freed memory


def requests(questions: list[str], count: int) -> list[dict]:
    """Return distinct request bodies."""
    rng, bodies = random.Random(0), []
    for i in range(count):
        messages = [{"role": "user", "content": rng.choice(questions)}]
        if rng.random() < 0.3:  # a later turn
            messages += [{"role": "assistant", "content": rng.choice(questions)[:200]},
                         {"role": "user", "content": rng.choice(questions)}]
        if rng.random() < 0.15:  # a long prompt
            messages[0]["content"] += " " + " ".join(rng.sample(questions, min(8, len(questions))))[:4000]
        if rng.random() < 0.5:  # a common prefix
            messages.insert(0, {"role": "system", "content": "You are brief, exact and friendly. " * 4})
        bodies.append({
            "messages": messages, "max_tokens": rng.choice(MAX_TOKENS), "seed": i,
            "stream": rng.random() < 0.7, **SAMPLING_OPTIONS[i % len(SAMPLING_OPTIONS)],
        })
    return bodies


class SoakResults:
    """Answers by outcome, and samples of the server's memory and open files."""

    def __init__(self):
        self.right = self.left = self.tokens = 0
        self.wrong: list[str] = []  # lost or different answers
        self.memory, self.files = [], []

    def add(self, body: dict, reply: Reply, expected: Reply) -> None:
        """Compare a reply under load with the expected one."""
        if reply.finish is None:
            self.left += 1
            is_equal = expected.text.startswith(reply.text)
        else:
            self.tokens += reply.tokens
            is_equal = reply[:3] == expected[:3]
            self.right += is_equal
        if not is_equal:
            self.wrong.append(f"differs: {body}: {reply.text!r}, expected {expected.text!r}")

    def sample(self, server: HttpPeer) -> None:
        """Sample the server's memory and open files."""
        process = Path(f"/proc/{server.process.pid}")
        pages = int((process / "statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir(process / "fd")))

    def check_growth(self, clients: int) -> None:
        """Record an error if memory or open files grew after the first tenth of the samples."""
        tenth = len(self.memory) // 10
        if self.memory[-1] > self.memory[tenth] + MAX_MEMORY_GROWTH:
            self.wrong.append(f"memory grew from {self.memory[tenth]:,} to {self.memory[-1]:,} bytes")
        if self.files[-1] > self.files[tenth] + clients:
            self.wrong.append(f"open files grew from {self.files[tenth]} to {self.files[-1]}")


async def soak(args, server: HttpPeer, bodies: list[dict]) -> SoakResults:
    """Send the requests without load, then from all clients for --minutes."""
    results = SoakResults()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
        expected = [await ask(client, body) for body in bodies]
        log_stderr(f"{len(bodies)} answered without load")
        deadline = time.perf_counter() + 60 * args.minutes

        async def run_client(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() < deadline:
                index = rng.randrange(len(bodies))
                disconnects = bodies[index]["stream"] and rng.randrange(DISCONNECT_ONE_IN) == 0
                try:
                    reply = await ask(client, bodies[index], rng.randrange(12) if disconnects else None)
                    results.add(bodies[index], reply, expected[index])
                except InputError as e:
                    results.wrong.append(f"lost: {e}")
                    await asyncio.sleep(1)

        async def watch() -> None:
            while True:
                results.sample(server)
                await asyncio.sleep(SAMPLE_INTERVAL)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(run_client(number) for number in range(args.clients)))
        watching.cancel()
        results.sample(server)
    results.check_growth(args.clients)
    return results


def action(args) -> None:
    """Soak a server. Raise InputError on any error."""
    bodies = requests(read_prompts(args.questions), args.requests)
    with our_server(args.checkpoint, "--threads", str(args.threads), *shlex.split(args.serve)) as server:
        results = asyncio.run(soak(args, server, bodies))
    bench.write(args.name, bench.describe(args) | vars(args) | vars(results))
    print(f"{args.clients} clients, {args.minutes:g} minutes: {results.right} answers as expected,"
          f" {len(results.wrong)} errors, {results.left} disconnected by clients;"
          f" memory {results.memory[-1] / 1e6:.0f} MB")
    if results.wrong:
        raise InputError(f"{len(results.wrong)} errors, see {args.name}.json; the first: {results.wrong[0]}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "soak")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its head")
    add("--questions", required=True, help="question file; first turns are prompts")
    add("--serve", default="--speculate eagle3", help="options of serve.py (default: --speculate eagle3)")
    add("--clients", type=positive, default=32, help="concurrent clients (default 32)")
    add("--minutes", type=float, default=10.0, help="duration (default 10)")
    add("--requests", type=positive, default=120, help="different requests (default 120)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
