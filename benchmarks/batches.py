"""What batches give: 1 to 56 texts at a time, plainly, with a drafter and by transformers, in turns.

    python benchmarks/batches.py --checkpoint DIR --questions FILE... [--minutes 20]

Every batch answers --each times as many questions as it holds, and --least at least. Answers end at different
lengths: at a stop id, or at a limit between the half and the whole of --max-new-tokens. Ours are decoded as a
server decodes them, in as many places as the largest batch has: where one ends, the next question takes its
place, and its prompt is read between the steps of the others. transformers decodes a batch of padded prompts
until its last answer ends, then the next batch.

tokens/s are those of all answers over the seconds from the first prompt to the last token, prompts included.
In a round everybody answers the same questions at every batch; the next round has others. A figure is the
median of the rounds, a ratio the median of the rounds' ratios. "steps ÷ plain", on a CPU only, leaves the
prompts out: it compares the tokens after the first, by the seconds that no prompt took. transformers takes
part in the first --peer-rounds rounds. Text with drafts is compared with plain text, id for id.

Raw figures go to benchmarks/results/NAME.json after every answered batch, the table to NAME.md. The same
command goes on where it was stopped, or where --minutes were over, on the same day; --fresh begins anew.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import bench  # first: it makes the modules below importable
from bench import describe, settle, write

from checkpoint.folder import read_config
from common.cli import note, positive
from common.errors import InputError
from drafters import METHODS, read_tree
from engine.api import Drafting, Target, load_target
from engine.runtime import Runtime
from engine.seats import Seats, Text
from engine.text_decoder import encode
from evaluation.asking import rotated
from sampling.options import Sampling
from tokens.dataset import read_prompts
from tree import TreeShape

PLAIN, DRAFTED, PEER = "plain", "drafted", "transformers"


class Answers(NamedTuple):
    """What a contender answered, in so many seconds.

    prompts: how many of them prompts took; None: not known. trees: steps of a text by tree, of all texts;
    none of a peer.
    """

    ids: list[list[int]]
    seconds: float
    prompts: float | None = None
    trees: dict[str, int] = {}


Contender = Callable[[list[list[int]], list[Sampling], int], Answers]  # prompts, requests, batch


def contender_of(seats: Seats) -> Contender:
    """These seats as a contender, warm. It never holds more texts at a time than the batch it is given."""
    seats.warm_up()

    def decode(prompts: list[list[int]], sampling: list[Sampling], batch: int) -> Answers:
        texts: list[Text] = []
        before = seats.prompt_seconds
        settle(seats.device)
        began = time.perf_counter()
        while seats.busy or len(texts) < len(prompts):
            while seats.batch - seats.free < batch and len(texts) < len(prompts):
                texts.append(seats.admit(prompts[len(texts)], sampling[len(texts)]))
            seats.advance()
        settle(seats.device)
        seconds = time.perf_counter() - began
        steps = sum((text.steps for text in texts), Counter())
        trees = {_name(shape): n for shape, n in steps.items()}
        reading = seats.prompt_seconds - before if seats.device.type == "cpu" else None
        return Answers([text.ids for text in texts], seconds, reading, trees)

    decode([[i + 1] for i in range(seats.batch)], [Sampling(4)] * seats.batch, seats.batch)  # touches caches
    return decode


def _name(shape) -> str:
    if shape.nodes == 1:
        return PLAIN
    return shape.name if isinstance(shape, TreeShape) else f"{shape.nodes} nodes"


def peer_of(o, stop_ids: list[int]) -> Contender | None:
    """transformers as a contender; None, with a line that says why, if it cannot be one."""
    weights = o.weights or o.checkpoint
    if not o.transformers or not o.peer_rounds:
        return None
    if not find_spec("transformers"):
        note("transformers: left out, it is not installed (pip install transformers)")
        return None
    if "quantization" in read_config(weights, "target"):
        note(f"transformers: left out, {weights} is quantised; name the unquantised target with --weights")
        return None
    from hugging_face import HuggingFace, as_llama

    peer = HuggingFace(as_llama(load_target(weights, Runtime(compile=False), note).model), stop_ids)

    def decode(prompts: list[list[int]], sampling: list[Sampling], batch: int) -> Answers:
        ids: list[list[int]] = []
        limits = [request.max_new_tokens for request in sampling]
        began = time.perf_counter()
        for first in range(0, len(prompts), batch):
            some = slice(first, first + batch)
            ids += peer.decode_together(prompts[some], limits[some])
        return Answers(ids, time.perf_counter() - began)

    decode([[1, 2], [3]], [Sampling(4)] * 2, 2)
    return decode


def questions_of(o, target: Target) -> list[list[int]]:
    """All questions as ids, of every file in turn. Raises InputError if one has no room."""
    files = [read_prompts(file) for file in o.questions]
    mixed = [of[i] for i in range(max(map(len, files))) for of in files if i < len(of)]
    ids = [encode(target.tokenizer, question) for question in mixed]
    fitting = [prompt for prompt in ids if len(prompt) + o.max_new_tokens < o.max_seq_len]
    if not fitting:
        raise InputError(f"no question and its answer fit in --max-seq-len {o.max_seq_len}")
    return fitting


def asked(o, questions: list[list[int]], turn: int, batch: int) -> tuple[list[list[int]], list[Sampling]]:
    """The questions of a round at this batch, and how each is to be answered."""
    count = max(o.each * batch, o.least)
    begin = turn * max(o.each * max(o.batch), o.least)
    half = o.max_new_tokens // 2
    numbers = [begin + i for i in range(count)]
    limits = [o.max_new_tokens - n * 37 % (half + 1) for n in numbers]
    sampling = [Sampling(limit, o.temperature, seed=n) for limit, n in zip(limits, numbers)]
    return [questions[n % len(questions)] for n in numbers], sampling


def settings_of(o) -> dict:
    """What two runs must share for one to go on with the other's figures."""
    contents = hashlib.sha256(b"".join(Path(file).read_bytes() for file in o.questions)).hexdigest()
    asked = "each", "least", "max_new_tokens", "max_seq_len", "temperature", "speculate", "tree"
    return describe(o.threads) | {
        "checkpoint": Path(o.checkpoint).name, "weights": o.weights and Path(o.weights).name,
        "places": max(o.batch), "questions": [Path(file).name for file in o.questions],
        "sha256": contents, **{name: getattr(o, name) for name in asked},
    }


def begun(o, settings: dict) -> list[dict]:
    """The cells that an earlier run with these settings left."""
    file = bench.RESULTS / f"{o.name}.json"
    if o.fresh or not file.exists():
        return []
    try:
        record = json.loads(file.read_text())
        if record["settings"] != settings:
            return []
        cells = record["cells"]
        note(f"going on with {file}: {len(cells)} cells are there (--fresh begins anew)")
        return cells
    except (ValueError, KeyError, TypeError):
        return []


def action(o) -> None:
    """Fill in the cells, as many as there is time for; write them, and the table."""
    began = time.monotonic()
    target = load_target(o.checkpoint, Runtime(isa=o.isa, device=o.device, compile=o.compile), note)
    if target.tokenizer is None:
        raise InputError(f"{o.checkpoint}: has no tokenizer, which the questions need")
    questions, places = questions_of(o, target), max(o.batch)
    room = {"places": places, "max_seq_len": o.max_seq_len}
    contenders = {
        PLAIN: contender_of(target.seats(**room)),
        DRAFTED: contender_of(target.seats(Drafting(o.speculate, tree=read_tree(o.tree)), **room)),
    }
    if peer := peer_of(o, target.config["stop_ids"]):
        contenders[PEER] = peer
    settings = settings_of(o)
    cells = begun(o, settings)
    for turn, batch, names in missing(o, [*contenders], cells):
        if o.minutes is not None and time.monotonic() - began > 60 * o.minutes:
            note(f"{o.minutes:g} minutes are over: the same command goes on from here")
            break
        prompts, sampling = asked(o, questions, turn, batch)
        for name in names:
            answers = contenders[name](prompts, sampling, batch)
            cells.append(cell_of(turn, batch, name, answers))
            note(f"  round {turn + 1}/{o.rounds}, batch {batch}, {name}: {cells[-1]['rate']:.1f} tokens/s")
        write(o.name, {"settings": settings, "cells": cells})
    lines = table(settings, cells)
    print(lines)
    (bench.RESULTS / f"{o.name}.md").write_text(lines + "\n")


def missing(o, names: list[str], cells: list[dict]) -> Iterator[tuple[int, int, list[str]]]:
    """The rounds and batches that are not there as a whole, and who takes part in them, in which order."""
    there = {(cell["round"], cell["batch"]) for cell in cells}
    for turn in range(o.rounds):
        for i, batch in enumerate(o.batch):
            if (turn, batch) not in there:
                order = rotated(names, turn + i)
                yield turn, batch, [name for name in order if name != PEER or turn < o.peer_rounds]


def cell_of(turn: int, batch: int, name: str, answers: Answers) -> dict:
    """What is kept of a contender's answers. steps: those of all texts."""
    tokens, reading = sum(map(len, answers.ids)), answers.prompts
    later = None if reading is None else (tokens - len(answers.ids)) / (answers.seconds - reading)
    digests = [hashlib.sha256(repr(ids).encode()).hexdigest()[:16] for ids in answers.ids]
    return {
        "round": turn, "batch": batch, "who": name, "seconds": answers.seconds, "tokens": tokens,
        "rate": tokens / answers.seconds, "prompt_seconds": reading, "step_rate": later, "texts": digests,
        "trees": answers.trees, "steps": sum(answers.trees.values()),
    }


def summarise(cells: list[dict]) -> dict[int, dict]:
    """By batch the medians of rates and ratios, tokens a step, how many texts are equal, and the trees."""
    rounds: dict[int, dict[int, dict[str, dict]]] = {}
    for cell in cells:
        rounds.setdefault(cell["batch"], {}).setdefault(cell["round"], {})[cell["who"]] = cell
    found = {}
    for batch, of_batch in sorted(rounds.items()):
        def middle(value: Callable[[dict[str, dict]], float], *names: str, of_batch=of_batch) -> float | None:
            some = [value(turn) for turn in of_batch.values() if all(name in turn for name in names)]
            return statistics.median(some) if some else None

        drafted = [turn[DRAFTED] for turn in of_batch.values()]
        pairs = [pair for turn in of_batch.values()
                 for pair in zip(turn[DRAFTED]["texts"], turn[PLAIN]["texts"], strict=True)]
        trees = sum((Counter(cell["trees"]) for cell in drafted), Counter())
        found[batch] = {
            "rates": {who: middle(lambda turn, who=who: turn[who]["rate"], who)
                      for who in (PLAIN, DRAFTED, PEER)},
            "ratios": {other: middle(lambda turn, other=other: turn[DRAFTED]["rate"] / turn[other]["rate"],
                                     DRAFTED, other) for other in (PLAIN, PEER)},
            "steps": middle(lambda turn: turn[DRAFTED]["step_rate"] / turn[PLAIN]["step_rate"])
                     if all(cell["step_rate"] for cell in drafted) else None,
            # The first token of a text comes with its prompt, not with a step.
            "tau": sum(cell["tokens"] - len(cell["texts"]) for cell in drafted)
                   / max(sum(cell["steps"] for cell in drafted), 1),
            "trees": {name: n / max(sum(trees.values()), 1) for name, n in trees.most_common()},
            "equal": sum(one == other for one, other in pairs), "of": len(pairs),
            "rounds": len(of_batch),
        }
    return found


def table(settings: dict, cells: list[dict]) -> str:
    """The summary as Markdown."""
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    who = settings["speculate"]
    heads = ["batch", "plain", who, PEER, f"{who} ÷ plain", "steps ÷ plain", f"{who} ÷ {PEER}",
             "tokens a step", "share of steps", "texts equal plain", "rounds"]
    lines = [
        f"{settings['checkpoint']}, tokens/s; {settings['device']}, {settings['isa']}, {settings['threads']}"
        f" threads, torch {settings['torch']}, {settings['date']}; at most {settings['max_new_tokens']} new"
        f" tokens, temperature {settings['temperature']:g} ({', '.join(settings['questions'])}).",
        "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|",
    ]
    for batch, found in summarise(cells).items():
        rates, ratios = found["rates"], found["ratios"]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found["trees"].items() if share >= 0.005)
        row = [
            str(batch), *(number(rates[name], 1) for name in (PLAIN, DRAFTED, PEER)),
            *(number(ratio, 2) for ratio in (ratios[PLAIN], found["steps"], ratios[PEER])),
            f"{found['tau']:.2f}", shares,
            f"{found['equal']}/{found['of']}", str(found["rounds"]),
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "batches")
    add = p.add_argument
    add("--checkpoint", required=True, help="a converted target with its head")
    add("--questions", required=True, nargs="+", metavar="FILE", help="JSON lines; first turns are asked")
    add("--batch", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 56], metavar="N",
        help="texts at a time (default 1 2 4 8 16 32 56)")
    add("--each", type=positive, default=2, help="answers for each place of a batch (default 2)")
    add("--least", type=positive, default=6, help="answers of a batch at least (default 6)")
    add("--rounds", type=positive, default=3, help="default 3")
    add("--peer-rounds", type=int, default=1, help="rounds in which transformers takes part (default 1)")
    add("--max-new-tokens", type=int, default=96, help="of the longest answers (default 96)")
    add("--max-seq-len", type=int, default=512, help="tokens of a question and its answer (default 512)")
    add("--temperature", type=float, default=0.0, help="default 0")
    methods = [name for name, method in METHODS.items() if method]
    add("--speculate", choices=methods, default="eagle3", help="what drafts (default eagle3)")
    add("--tree", help="as for generate.py (default: by measurement, for every number of texts)")
    add("--transformers", action=argparse.BooleanOptionalAction, default=True,
        help="if it is installed (default)")
    add("--weights", metavar="DIR", help="the unquantised target, for transformers (default: --checkpoint)")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--isa", help="of the kernels (default: the best)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--minutes", type=float, help="begin nothing more after so many (default: no end)")
    add("--fresh", action="store_true", help="do not go on with the figures of an earlier run")
    for flag, least in (("--max-new-tokens", 2), ("--max-seq-len", 4), ("--peer-rounds", 0),
                        ("--temperature", 0), ("--minutes", 0)):
        p.within(flag, least, float("inf"))
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
