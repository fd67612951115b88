"""Acceptance length where texts share rows: so many drafted nodes each, or the likeliest of all. Not timed.

    python benchmarks/dealt_rows.py --checkpoint DIR --questions set1.jsonl set2.jsonl ... [--texts 4]

A step of several texts has rows for few nodes. Dealt equally, a text whose next tokens are certain gets no
more of them than one whose are not. Here the target answers with a head beside it; then steps of different
texts are drawn at random, so many at a time, and their nodes counted as they would be accepted both ways. How
likely a node is, is said by the head. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import random
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import describe, write
from torch import Tensor

from checkpoint.loading import load_head, load_model
from common.errors import InputError
from drafters.eagle import Eagle
from engine.calibrating import Recorder, record_answers
from engine.calibration import USUAL
from engine.text_decoder import encode
from kernels.choose import choose_backend
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer

LEVELS = (1, 2, 3)
NODES = (1, 2, 3)  # drafted nodes for each text
SEED = 0

Steps = list[tuple[Tensor, Tensor]]  # of a text: scores of a step's candidates [n], whether they are right


def accepted(texts: list[Steps], together: int, draws: int, size: int) -> dict[int, tuple[float, float]]:
    """tau by nodes for each text: dealt equally, and the likeliest of all.

    texts: of which `together` are drawn each time, with one step of each. size: candidates that count.
    """
    drawn = random.Random(SEED)
    equal, pooled = dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 0)
    for _ in range(draws):
        steps = [drawn.choice(text) for text in drawn.sample(texts, together)]
        scores = torch.stack([scores[:size] for scores, _ in steps])
        right = torch.stack([right[:size] for _, right in steps])
        for nodes in NODES:
            equal[nodes] += int(right.gather(1, scores.topk(nodes, 1).indices).sum())
            pooled[nodes] += int(right.flatten()[scores.flatten().topk(together * nodes).indices].sum())
    return {n: (1 + equal[n] / draws / together, 1 + pooled[n] / draws / together) for n in NODES}


def run(o) -> None:
    """Decode all questions; print a row for each temperature and number of levels."""
    target, config = load_model(o.checkpoint, "cpu")
    head = load_head(Path(o.checkpoint) / "eagle3", target)
    choose_backend("cpu").prepare(target, head)
    tokenizer = Tokenizer.load(o.checkpoint)
    prompts = [encode(tokenizer, prompt) for path in o.questions for prompt in read_prompts(path)[: o.limit]]
    width, record = USUAL.width, describe(o.threads) | {"texts": o.texts, "rows": []}
    columns = (f"{n} {how}" for n in NODES for how in ("each", "of all"))
    print("T", "levels", *columns, sep="\t")
    for temperature in o.temperature:
        recorder = Recorder(Eagle(head, USUAL), (2, width))  # 2: of the trees that are accepted
        answers = record_answers(target, recorder, prompts, config["stop_ids"], o.max_new_tokens, temperature)
        texts = [answer.scored for answer in answers if answer.scored]
        if len(texts) < o.texts:
            raise InputError(f"{len(texts)} answers are long enough; --texts {o.texts} needs as many")
        for levels in LEVELS:
            taus = accepted(texts, o.texts, o.draws, width + (levels - 1) * width**2)
            record["rows"].append({"temperature": temperature, "levels": levels, "tau": taus})
            print(temperature, levels, *(f"{tau:.3f}" for pair in taus.values() for tau in pair), sep="\t",
                  flush=True)
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "dealt-rows")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--questions", nargs="+", required=True, metavar="FILE")
    add("--limit", type=int, default=8, help="questions of each file (default 8)")
    add("--max-new-tokens", type=int, default=64)
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="T")
    add("--texts", type=int, default=4, help="that are decoded together (default 4)")
    add("--draws", type=int, default=4000, help="of steps (default 4000)")
    for option in ("--limit", "--max-new-tokens", "--texts", "--draws"):
        p.within(option, 1, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
