"""Throughput and latency of servers with 1 to 8 clients: ours, plain and with EAGLE-3, and llama-server.

    python benchmarks/serving.py --checkpoint DIR --questions question.jsonl --llama-server FILE --gguf FILE

Every server has one slot per client. In a round each client streams --answers greedy chat completions of at
most --max-new-tokens; servers alternate. tokens/s: of all clients, from the first request to the last answer.
Medians over rounds. Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import sys
import time
from functools import partial

import bench  # first: it makes the modules below importable
import httpx
from bench import positive
from processes import TIMEOUT, HttpPeer, LlamaServer, ask, our_server

from common.cli import log_stderr
from common.errors import InputError
from tokens.dataset import read_prompts


async def run_clients(server: HttpPeer, questions: list[str], clients: int, tokens: int) -> dict:
    """Send all questions from concurrent clients. Return tokens/s, TTFT and time per output token.

    Raise InputError if the server fails, or no answer has two tokens.
    """
    waiting, replies = list(questions), []

    async def one(client: httpx.AsyncClient) -> None:
        while waiting:
            messages = [{"role": "user", "content": waiting.pop(0)}]
            body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
            replies.append(await ask(client, body))

    limits = httpx.Limits(max_keepalive_connections=0)  # a server may close a connection that was idle
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(clients)))
        seconds = time.perf_counter() - began
    timed = [reply for reply in replies if reply.tokens > 1 and not math.isnan(reply.first)]
    if not timed:
        raise InputError(f"{server.name}: no answer has more than one token")
    return {
        "tokens/s": sum(reply.tokens for reply in replies) / seconds,
        "TTFT, ms": 1000 * statistics.median(reply.first for reply in timed),
        "TPOT, ms": 1000 * statistics.median(reply.later / (reply.tokens - 1) for reply in timed),
    }


def action(o) -> None:
    """Measure all servers with all numbers of clients, alternating. Print the table."""
    questions, most, rounds = read_prompts(o.questions), max(o.clients), []
    common = "--threads", str(o.threads), "--slots", str(most)
    makers = {
        "ours plain": partial(our_server, o.checkpoint, *common),
        "ours EAGLE-3": partial(our_server, o.checkpoint, *common, "--speculate", "eagle3"),
    }
    if o.llama_server:
        makers["llama-server"] = partial(LlamaServer, o.llama_server, o.gguf, o.threads, parallel=most)
    servers = {}
    with contextlib.ExitStack() as started:
        for name, make in makers.items():
            log_stderr(f"starting {name} ...")
            servers[name] = server = started.enter_context(make())
            asyncio.run(run_clients(server, questions[:most], most, 32))  # to warm up
        for i in range(o.rounds):
            for clients in o.clients:
                first = i * most * o.answers
                some = [questions[n % len(questions)] for n in range(first, first + clients * o.answers)]
                for name in bench.rotate_left(servers, i):
                    found = asyncio.run(run_clients(servers[name], some, clients, o.max_new_tokens))
                    rounds.append({"round": i, "clients": clients, "server": name, **found})
                    log_stderr(f"  round {i + 1}/{o.rounds}, {clients} clients, {name}:"
                               f" {found['tokens/s']:.1f}")
    record = bench.describe(o) | {"checkpoint": o.checkpoint, "gguf": o.gguf, "rounds": rounds}
    bench.write(o.name, record)
    keys, rows = ("tokens/s", "TTFT, ms", "TPOT, ms"), []
    for clients in o.clients:
        for name in servers:
            own, last = ([r for r in rounds if (r["clients"], r["server"]) == (clients, who)]
                         for who in (name, [*servers][-1]))
            ratio = statistics.median(a["tokens/s"] / b["tokens/s"] for a, b in zip(own, last))
            rows.append([clients, name, ratio, *(statistics.median(r[key] for r in own) for key in keys)])
    print(bench.table(record, ["clients", "server", "÷ the last server", *keys], rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "serving")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--questions", required=True, help="JSON lines; the first turn of each is the prompt")
    add("--clients", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="numbers of clients (default 1 2 4 8)")
    add("--answers", type=positive, default=3, help="answers per client and round (default 3)")
    add("--rounds", type=positive, default=3, help="rounds (default 3)")
    add("--max-new-tokens", type=positive, default=128, help="maximum tokens of an answer (default 128)")
    add("--llama-server", metavar="FILE", help="llama.cpp's llama-server; needs --gguf")
    add("--gguf", metavar="FILE", help="the target as GGUF")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
