"""One decoder for thousands of requests: is each text that of a fresh one, and do memory and files stay?

    python benchmarks/long_life.py --checkpoint DIR --requests 2000

Requests of random lengths, seeds and samplings go through one decoder, one after the other: prompts as ids
and as text, chats that keep their cache, some of them reset in between, and one in seven left in the middle.
Memory and open files are read along the way. Then each is decoded again by a decoder that has decoded nothing
yet, and must have the same ids (those that were left: the same beginning). Raw figures go to
benchmarks/results/NAME.json; the exit status is 1 if a text is another one, or memory or files grow.
"""
from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import bench  # first: it makes the modules below importable
from bench import describe, write

from common.cli import note, positive
from common.errors import InputError
from engine.api import Drafting, Target, load_target
from engine.calibrating import PROMPTS
from engine.text_decoder import Prompt, TextDecoder
from kernels.isa import choose
from sampling.options import Sampling

LEAVERS = 7  # one in so many requests is left in the middle
TURNS = 3  # of a chat, at most
GROWTH = 32e6  # bytes by which memory may grow after the first tenth: allocators keep what they had once
WRITTEN = (1, 2, 5, 12, 24, 40)  # new tokens, at most
KINDS = (
    {}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05}, {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 0.8, "repetition_penalty": 1.15}, {"stop": ("e", "\n\n")}, {"logprobs": 2},
    {"logit_bias": ((10, 3.0), (11, -100.0))}, {"temperature": 0.6, "json_schema": '{"type": "object"}'},
)


@dataclass
class Life:
    """What happened to the requests."""

    asked: Counter = field(default_factory=Counter)  # by kind
    tokens: int = 0
    others: list[dict] = field(default_factory=list)  # whose text is not that of a fresh decoder
    memory: list[int] = field(default_factory=list)  # bytes, after each request
    files: list[int] = field(default_factory=list)

    def grown(self) -> float:
        """Bytes by which memory grew: the median of the last tenth over that of the second."""
        tenth = max(1, len(self.memory) // 10)
        return statistics.median(self.memory[-tenth:]) - statistics.median(self.memory[tenth : 2 * tenth])

    def check(self) -> None:
        """Raise InputError if a text was another one, or something grew."""
        if self.others:
            raise InputError(f"{len(self.others)} texts are not those of a fresh decoder: {self.others[0]}")
        if self.grown() > GROWTH:
            raise InputError(f"memory grew by {self.grown() / 1e6:.0f} MB")
        if self.files[-1] > self.files[len(self.files) // 10]:
            raise InputError(f"{self.files[-1] - self.files[len(self.files) // 10]} files more are open")


@dataclass(frozen=True)
class Request:
    """One request, and what was written. left: after how many pieces its reader went away."""

    kind: str
    prompt: Prompt
    sampling: Sampling
    left: int | None
    ids: list[int]


def live(
    target: Target, drafting: Drafting, count: int, max_seq_len: int, seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Life:
    """Ask one decoder `count` requests; then ask a fresh one each of them again."""
    chance, life = random.Random(seed), Life()
    decoder = target.decoder(drafting, max_seq_len=max_seq_len)
    done: list[Request] = []
    chat: list[dict] = []
    for number in range(1, count + 1):
        kind = chance.choice(("ids", "text", "chat", "chat", "chat after a reset"))
        sampling = Sampling(chance.choice(WRITTEN), seed=chance.getrandbits(64), **chance.choice(KINDS))
        reuse = kind not in ("ids", "text")
        if reuse:
            if kind == "chat after a reset" or len(chat) >= 2 * TURNS:
                chat = []
            chat = [*chat, {"role": "user", "content": words(chance)}]
            prompt: Prompt = chat
        elif kind == "text":
            prompt = words(chance)
        else:
            length, top = chance.randint(1, max_seq_len // 3), target.model.args.vocab_size - 1
            prompt = [chance.randint(0, top) for _ in range(length)]
        left = chance.randint(1, 4) if chance.random() < 1 / LEAVERS else None
        ids = decode(decoder, prompt, sampling, reuse, left)
        if reuse:
            chat = [*chat, {"role": "assistant", "content": target.tokenizer.decode(ids)}]
        done.append(Request(kind, prompt, sampling, left, ids))
        life.asked[kind + (", left" if left else "")] += 1
        life.tokens += len(ids)
        life.memory.append(resident())
        life.files.append(len(os.listdir("/proc/self/fd")))
        if number % 200 == 0:
            say(f"{number} requests, {life.memory[-1] / 1e6:.0f} MB, {life.files[-1]} files")
    for number, request in enumerate(done, 1):
        fresh = target.decoder(drafting, max_seq_len=max_seq_len)
        ids = decode(fresh, request.prompt, request.sampling, False, None)
        if request.ids != (ids if request.left is None else ids[: len(request.ids)]):
            life.others.append({"number": number, **vars(request), "sampling": str(request.sampling)})
        if number % 200 == 0:
            say(f"{number} compared, {len(life.others)} others")
    return life


def words(chance: random.Random) -> str:
    """A prompt of random length."""
    text = " ".join(chance.sample(PROMPTS, chance.randint(1, 2)))
    return text[: chance.randint(1, len(text))].strip() or "x"


def decode(
    decoder: TextDecoder, prompt: Prompt, sampling: Sampling, reuse: bool, left: int | None
) -> list[int]:
    """The ids of a text. left: go away after so many pieces, as after Ctrl-C."""
    job = decoder.job([prompt], [sampling], reuse=reuse)
    for pieces, _ in enumerate(job, 1):
        if pieces == left:
            break
    return job.results()[0].ids


def resident() -> int:
    """Bytes of memory that this process occupies."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def action(o) -> None:
    """Run it. Raises InputError if something went wrong."""
    target = load_target(o.checkpoint, say=note)
    began = time.monotonic()
    life = live(target, Drafting(o.speculate, tree=o.tree), o.requests, o.max_seq_len, o.seed, note)
    seconds = time.monotonic() - began
    step = max(1, len(life.memory) // 100)
    write(o.name, describe(o.threads) | {
        "isa": choose().name, "speculate": o.speculate, "tree": o.tree, "requests": o.requests,
        "max_seq_len": o.max_seq_len, "seed": o.seed, "seconds": seconds, "asked": dict(life.asked),
        "tokens": life.tokens, "others": life.others, "memory": life.memory[::step], "grown": life.grown(),
        "files": life.files[::step],
    })
    print(f"{o.requests} requests ({', '.join(f'{n} {kind}' for kind, n in life.asked.items())}),"
          f" {life.tokens:,} tokens, {seconds:.0f} s")
    print(f"other texts than fresh: {len(life.others)}; memory grew by {life.grown() / 1e6:.1f} MB"
          f" to {life.memory[-1] / 1e6:.0f} MB; files open: {life.files[0]}, at the end {life.files[-1]}")
    life.check()


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "long_life", threads=1)
    p.add_argument("--checkpoint", required=True, help="converted target with its head")
    p.add_argument("--speculate", default="eagle3", help="default eagle3")
    p.add_argument("--tree", default="8,2,4", help="default 8,2,4, so that nothing is measured first")
    p.add_argument("--requests", type=positive, default=2000)
    p.add_argument("--max-seq-len", type=positive, default=512)
    p.add_argument("--seed", type=int, default=0)
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
