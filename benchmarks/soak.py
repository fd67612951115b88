"""Many clients on one server for minutes: is any request lost, mixed up or answered with an error?

    python benchmarks/soak.py --checkpoint DIR --questions question.jsonl --clients 32 --minutes 10

Makes --requests different requests: prompts short and long, several turns, greedy and with seeds, all kinds
of sampling, stop texts, JSON, with and without drafts, whole and as streams. First the server answers each
alone. Then so many clients ask them over and over; one in seven streams is left in the middle. Every answer
that ends must be the one given alone, text, finish reason and count of tokens. Raw figures go to
benchmarks/results/NAME.json; the exit status is 1 if an answer was lost or another one.
"""
from __future__ import annotations

import asyncio
import os
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

import bench  # first: it makes the modules below importable
import httpx
from bench import describe, write
from clients import PATIENCE, Answer, ask, our_server
from peer_process import HttpPeer

from common.cli import note, positive
from common.errors import InputError
from kernels.isa import choose
from tokens.dataset import read_prompts

KINDS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.05},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0.8, "repetition_penalty": 1.15},
    {"temperature": 0, "stop": [". ", "\n\n"]},
    {"temperature": 0.7, "speculate": False},
    {"temperature": 0, "logit_bias": {"284": -100, "198": 1.5}},
    {"temperature": 0.5, "response_format": {"type": "json_schema", "json_schema": {
        "name": "found", "schema": {
            "type": "object", "properties": {"answer": {"type": "string", "maxLength": 40},
                                             "sure": {"type": "boolean"}},
            "required": ["answer", "sure"], "additionalProperties": False,
        }}}},
]
LENGTHS = (1, 4, 12, 30, 60, 100, 160)  # tokens, at most
LEAVERS = 7  # one in so many streams is left


def requests(questions: list[str], count: int, seed: int) -> list[dict]:
    """So many different bodies of requests."""
    chance = random.Random(seed)
    made = []
    for i in range(count):
        messages = [{"role": "user", "content": chance.choice(questions)}]
        if chance.random() < 0.3:  # a later turn
            messages += [{"role": "assistant", "content": chance.choice(questions)[:200]},
                         {"role": "user", "content": chance.choice(questions)}]
        if chance.random() < 0.15:  # a long prompt
            messages[0]["content"] += " " + " ".join(chance.sample(questions, min(8, len(questions))))[:4000]
        if chance.random() < 0.5:  # beginnings that many share
            messages.insert(0, {"role": "system", "content": "You are brief, exact and friendly. " * 4})
        made.append({
            "messages": messages, "max_tokens": chance.choice(LENGTHS), "seed": i,
            "stream": chance.random() < 0.7, **KINDS[i % len(KINDS)],
        })
    return made


class Ledger:
    """What happened to the requests."""

    def __init__(self):
        self.right = self.left = self.refused = self.tokens = 0
        self.lost: list[str] = []
        self.other: list[dict] = []
        self.first: list[float] = []
        self.each: list[float] = []

    def words(self) -> str:
        """What there is so far."""
        return (
            f"{self.right} answers right, {len(self.other)} other, {len(self.lost)} lost, {self.left} left "
            f"by their clients, {self.refused} told to come again"
        )

    def enter(self, body: dict, answer: Answer, alone: Answer) -> None:
        """Compare an answer with the one given alone."""
        self.refused += answer.refused
        if answer.finish is None:
            self.left += 1
            if not alone.text.startswith(answer.text):
                self.other.append({"body": body, "got": answer.text, "alone": alone.text})
            return
        self.tokens += answer.tokens
        if answer[:3] != alone[:3]:
            self.other.append({"body": body, "got": answer[:3], "alone": alone[:3]})
            return
        self.right += 1
        if answer.first == answer.first:
            self.first.append(answer.first)
            if answer.tokens > 1:
                self.each.append(answer.later / (answer.tokens - 1))


async def soak(o, server: HttpPeer, bodies: list[dict]) -> tuple[Ledger, list[int], float]:
    """Ask. Returns what happened, the server's bytes of memory every five seconds, and the seconds."""
    ledger, memory = Ledger(), []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=o.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        alone = []
        for i, body in enumerate(bodies):
            alone.append(await ask(client, body))
            if i % 20 == 19:
                note(f"  {i + 1}/{len(bodies)} alone")
        began = time.perf_counter()
        ends = began + 60 * o.minutes

        async def one(number: int) -> None:
            chance = random.Random(o.seed * 1000 + number)
            while time.perf_counter() < ends:
                which = chance.randrange(len(bodies))
                body, leave = bodies[which], None
                if body["stream"] and chance.randrange(LEAVERS) == 0:
                    leave = chance.randrange(12)
                try:
                    ledger.enter(body, await ask(client, body, leave), alone[which])
                except InputError as e:
                    ledger.lost.append(str(e))
                    await asyncio.sleep(1)

        async def watch() -> None:
            while True:
                memory.append(resident(server))
                if len(memory) % 12 == 0:
                    passed = time.perf_counter() - began
                    note(f"  {passed:.0f} s: {ledger.words()}, {memory[-1] / 1e6:.0f} MB")
                await asyncio.sleep(5)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(number) for number in range(o.clients)))
        watching.cancel()
        return ledger, memory, time.perf_counter() - began


def resident(server: HttpPeer) -> int:
    """Bytes of memory that it occupies."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def spread(values: list[float]) -> dict[str, float]:
    """Median and the value that one in a hundred exceeds, in milliseconds."""
    ordered = sorted(values)
    return {"p50": 1000 * statistics.median(ordered), "p99": 1000 * ordered[int(0.99 * (len(ordered) - 1))]}


def action(o) -> None:
    """Run it. Raises InputError if something went wrong."""
    bodies = requests(read_prompts(o.questions), o.requests, o.seed)
    with our_server(o.checkpoint, "--threads", str(o.threads), *shlex.split(o.serve)) as server:
        ledger, memory, seconds = asyncio.run(soak(o, server, bodies))
    record = describe(o.threads) | {
        "isa": choose().name,
        "serve": o.serve, "clients": o.clients, "seconds": seconds, "right": ledger.right,
        "left": ledger.left, "refused": ledger.refused, "lost": ledger.lost, "other": ledger.other,
        "tokens": ledger.tokens, "first_ms": spread(ledger.first), "token_ms": spread(ledger.each),
        "memory": memory,
    }
    write(o.name, record)
    later = memory[len(memory) // 10:]
    print(f"{o.clients} clients, {seconds:.0f} s, serve.py {o.serve}: {record['device']}, {record['isa']}")
    print(f"{ledger.words()}; {ledger.tokens / seconds:.0f} tokens/s")
    for name, key in (("first text", "first_ms"), ("each token after it", "token_ms")):
        print(f"{name}: p50 {record[key]['p50']:.0f} ms, p99 {record[key]['p99']:.0f} ms")
    print(f"memory: {later[0] / 1e6:.0f} MB after a tenth, {later[-1] / 1e6:.0f} MB at the end")
    if ledger.lost or ledger.other:
        raise InputError(f"answers were lost, or others than alone: see {o.name}.json")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "soak")
    p.add_argument("--checkpoint", required=True, help="converted target with its head")
    p.add_argument("--questions", required=True, help="question file, whose first turns are asked")
    p.add_argument("--serve", default="--speculate eagle3", help="options of serve.py")
    p.add_argument("--clients", type=positive, default=32)
    p.add_argument("--minutes", type=float, default=10.0)
    p.add_argument("--requests", type=positive, default=120, help="different ones (default 120)")
    p.add_argument("--seed", type=int, default=0)
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
