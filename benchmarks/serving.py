"""Throughput and latency of servers with 1 to 8 clients: ours, plain and with EAGLE-3, and llama-server.

    python benchmarks/serving.py --checkpoint DIR --questions question.jsonl --llama-server FILE --gguf FILE

Every server has one slot per client. In a round, the clients together stream --answers times their number of
greedy chat completions of at most --max-new-tokens, from one queue of questions; servers alternate. tokens/s:
of all clients, from the first request to the last answer. The table has medians over rounds. Writes
benchmarks/results/NAME.json.
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
    queue, replies = list(questions), []

    async def run_client(client: httpx.AsyncClient) -> None:
        while queue:
            messages = [{"role": "user", "content": queue.pop(0)}]
            body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
            replies.append(await ask(client, body))

    limits = httpx.Limits(max_keepalive_connections=0)  # servers may close idle connections
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
        start_time = time.perf_counter()
        await asyncio.gather(*(run_client(client) for _ in range(clients)))
        seconds = time.perf_counter() - start_time
    timed = [reply for reply in replies if reply.tokens > 1 and not math.isnan(reply.first)]
    if not timed:
        raise InputError(f"{server.name}: no answer has more than run_client token")
    return {
        "tokens/s": sum(reply.tokens for reply in replies) / seconds,
        "TTFT, ms": 1000 * statistics.median(reply.first for reply in timed),
        "TPOT, ms": 1000 * statistics.median(reply.later / (reply.tokens - 1) for reply in timed),
    }


def action(args) -> None:
    """Measure all servers with all numbers of clients, alternating. Print the table."""
    questions, max_clients, rounds = read_prompts(args.questions), max(args.clients), []
    common = "--threads", str(args.threads), "--slots", str(max_clients)
    starters = {
        "ours plain": partial(our_server, args.checkpoint, *common),
        "ours EAGLE-3": partial(our_server, args.checkpoint, *common, "--speculate", "eagle3"),
    }
    if args.llama_server:
        starters["llama-server"] = partial(
            LlamaServer, args.llama_server, args.gguf, args.threads, parallel=max_clients)
    servers = {}
    with contextlib.ExitStack() as stack:
        for name, start_server in starters.items():
            log_stderr(f"starting {name} ...")
            servers[name] = server = stack.enter_context(start_server())
            asyncio.run(run_clients(server, questions[:max_clients], max_clients, 32))  # warmup
        for i in range(args.rounds):
            for clients in args.clients:
                first = i * max_clients * args.answers
                numbers = range(first, first + clients * args.answers)
                batch = [questions[n % len(questions)] for n in numbers]
                for name in bench.rotate_left(servers, i):
                    result = asyncio.run(run_clients(servers[name], batch, clients, args.max_new_tokens))
                    rounds.append({"round": i, "clients": clients, "server": name, **result})
                    log_stderr(f"  round {i + 1}/{args.rounds}, {clients} clients, {name}:"
                               f" {result['tokens/s']:.1f}")
    record = bench.describe(args) | {"checkpoint": args.checkpoint, "gguf": args.gguf, "rounds": rounds}
    bench.write(args.name, record)
    keys, rows = ("tokens/s", "TTFT, ms", "TPOT, ms"), []
    last_server = [*servers][-1]
    for clients in args.clients:
        for name in servers:
            own, baseline = ([r for r in rounds if (r["clients"], r["server"]) == (clients, server)]
                             for server in (name, last_server))
            ratio = statistics.median(a["tokens/s"] / b["tokens/s"] for a, b in zip(own, baseline))
            rows.append([clients, name, ratio, *(statistics.median(r[key] for r in own) for key in keys)])
    print(bench.table(record, ["clients", "server", f"speedup over {last_server}", *keys], rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "serving")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--questions", required=True, help="JSON lines; prompts are the first turns")
    add("--clients", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N",
        help="numbers of clients (default 1 2 4 8)")
    add("--answers", type=positive, default=3, help="answers per round and client, on average (default 3)")
    add("--rounds", type=positive, default=3, help="rounds (default 3)")
    add("--max-new-tokens", type=positive, default=128, help="maximum tokens of an answer (default 128)")
    add("--llama-server", metavar="FILE", help="llama.cpp's llama-server; needs --gguf")
    add("--gguf", metavar="FILE", help="the target as GGUF")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
