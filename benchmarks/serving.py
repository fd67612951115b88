"""What servers give to 1, 2, 4, 8 clients at once: ours, plain and with EAGLE-3, and llama-server, in turns.

    python benchmarks/serving.py --checkpoint DIR-w8a8 --questions question.jsonl \\
        --llama-server BIN --gguf MODEL.gguf --weights DIR

--checkpoint is what serve.py serves. llama-server gets the unquantised --weights as Q8_0, in a file with the
metadata of --gguf. Every server has as many places as there are clients at most. In a round, so many clients
ask for --each answers each, as chat streams, greedy, of at most --max-new-tokens; then the next server is
asked the same. tokens/s are those of all clients, from the first request to the last answer; "first" is the
time to the first text, "each" the time of a token after it, of one client. Medians over the rounds. Raw
figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import bench  # first: it makes the modules below importable
import httpx
from bench import describe, write
from clients import PATIENCE, Answer, ask, our_server
from peer_process import HttpPeer

from checkpoint.folder import read_config
from common.cli import note, positive
from common.errors import InputError
from engine.api import load_target
from engine.runtime import Runtime
from evaluation.sets import rotated
from kernels.isa import choose
from tokens.dataset import read_prompts


def start(o, started: contextlib.ExitStack) -> dict[str, HttpPeer]:
    """The servers, by name. started: ends them, and removes their files."""
    most = str(max(o.clients))
    mode = read_config(o.checkpoint, "target").get("quantization", {}).get("mode", "as stored")
    common = "--threads", str(o.threads), "--slots", most
    servers = {
        f"ours plain, {mode}": our_server(o.checkpoint, *common),
        f"ours EAGLE-3, {mode}": our_server(o.checkpoint, *common, "--speculate", "eagle3"),
    }
    if o.llama_server:
        from gguf_copy import write_gguf
        from llama_peer import LlamaServer

        folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
        target = load_target(o.weights, Runtime(compile=False), note)
        file = write_gguf(Path(o.gguf), target.model, folder / "Q8_0.gguf", "Q8_0")
        servers["llama-server, Q8_0"] = LlamaServer(
            o.llama_server, file, o.threads, [], parallel=max(o.clients)
        )
    for name, server in servers.items():
        note(f"starting {name} ...")
        started.enter_context(server)
    return servers


async def load(server: HttpPeer, questions: list[str], clients: int, tokens: int) -> dict:
    """So many clients ask all questions. Returns tokens per second, and milliseconds of one client.

    Raises InputError if the server fails.
    """
    waiting, answers = list(questions), []

    async def one(client: httpx.AsyncClient) -> None:
        while waiting:
            body = {"messages": [{"role": "user", "content": waiting.pop(0)}], "max_tokens": tokens,
                    "temperature": 0, "stream": True}
            try:
                answers.append(await ask(client, body))
            except InputError as e:
                raise InputError(f"{server.name}: {e}") from None

    # A connection for each request: a server may close one that was idle for long.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(clients)))
        seconds = time.perf_counter() - began
    return figures(answers, seconds)


def figures(answers: list[Answer], seconds: float) -> dict:
    """What they had together, and the median client. Raises InputError if no answer has two tokens."""
    timed = [answer for answer in answers if answer.tokens > 1 and answer.first == answer.first]
    if not timed:
        raise InputError("no answer has more than one token: nothing to time")
    return {
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "first_ms": 1000 * statistics.median(answer.first for answer in timed),
        "each_ms": 1000 * statistics.median(answer.later / (answer.tokens - 1) for answer in timed),
    }


def action(o) -> None:
    """All counts of clients, all servers in turns; the table, the raw figures."""
    questions = read_prompts(o.questions)
    rounds = []
    with contextlib.ExitStack() as started:
        servers = start(o, started)
        for server in servers.values():
            asyncio.run(load(server, questions[: max(o.clients)], max(o.clients), 32))  # to warm up
        for i in range(o.rounds):
            for clients in o.clients:
                count = clients * o.each
                begin = i * max(o.clients) * o.each
                asked = [questions[(begin + j) % len(questions)] for j in range(count)]
                for name in rotated([*servers], i):
                    found = asyncio.run(load(servers[name], asked, clients, o.max_new_tokens))
                    rounds.append({"round": i, "clients": clients, "server": name, **found})
                    note(f"  round {i + 1}/{o.rounds}, {clients} clients, {name}: "
                         f"{found['tokens_per_second']:.1f} tokens/s")
    record = describe(o.threads) | {
        "isa": choose().name,
        "checkpoint": Path(o.checkpoint).name, "max_new_tokens": o.max_new_tokens, "rounds": rounds,
    }
    write(o.name, record)
    print(table(record, rounds, o.clients, [*servers]))


def table(record: dict, rounds: list[dict], counts: list[int], names: list[str]) -> str:
    """Medians as Markdown: a row for each count of clients and server."""
    lines = [
        f"{record['device']}, {record['isa']}, {record['threads']} threads, {record['date']}", "",
        "| clients | server | tokens/s | of the last server's | first, ms | each, ms |", "|---" * 6 + "|",
    ]
    for clients in counts:
        of = {name: [r for r in rounds if (r["clients"], r["server"]) == (clients, name)] for name in names}
        for name in names:
            middle = {key: statistics.median(r[key] for r in of[name])
                      for key in ("tokens_per_second", "first_ms", "each_ms")}
            ratio = statistics.median(
                a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(of[name], of[names[-1]])
            )
            lines.append(
                f"| {clients} | {name} | {middle['tokens_per_second']:.1f} | {ratio:.2f} "
                f"| {middle['first_ms']:.0f} | {middle['each_ms']:.1f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "serving")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head, as it is to be served")
    add("--questions", required=True, help="JSON lines; their first turns are asked")
    add("--clients", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default 1 2 4 8")
    add("--each", type=positive, default=3, help="answers for each client in a round (default 3)")
    add("--rounds", type=positive, default=3, help="default 3")
    add("--max-new-tokens", type=positive, default=128)
    add("--llama-server", metavar="FILE", help="llama.cpp's llama-server")
    add("--gguf", metavar="FILE", help="any GGUF of this model")
    add("--weights", metavar="DIR", help="the unquantised target, for llama-server")
    p.refuse(
        lambda o: o.llama_server and not (o.gguf and o.weights),
        lambda o: "--llama-server: needs --gguf and --weights",
    )
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
