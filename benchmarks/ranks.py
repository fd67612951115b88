"""One process of N threads against N ranks of one thread: the same texts on the same processors, in turns.

    python benchmarks/ranks.py --checkpoint checkpoints/smollm2-135m

Each run is a new process (or torchrun and its ranks) of generate.py, plain and with EAGLE-3, which answers
the questions one after the other. How many texts are equal is told: all in float32; in bf16 sums of parts are
rounded otherwise. What one exchange among the ranks takes is timed alone (exchange.py). Raw figures go to
benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys

import bench  # first: it makes the modules below importable
from bench import ROOT, describe, write

from checkpoint.folder import read_config
from common.errors import InputError
from common.tree_shapes import TreeShape
from engine.calibrating import PROMPTS
from kernels.isa import choose

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
METHODS = {"plain": (), "EAGLE-3": ("--speculate", "eagle3", "--tree")}


def start(o, ranks: int, method: str, *more: str) -> subprocess.CompletedProcess:
    """Run generate.py on so many ranks, which share the threads. Raises InputError if it fails."""
    own = METHODS[method] and (*METHODS[method], o.tree)
    launch = (sys.executable,) if ranks == 1 else (*LAUNCH, str(ranks))
    command = [
        *launch, str(ROOT / "generate.py"), "--checkpoint", o.checkpoint, "--device", "cpu", *own,
        "--threads", str(o.threads // ranks), "--batch-size", "1", *more,
    ]
    if o.dtype:
        command += ["--dtype", o.dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": str(o.threads // ranks)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise InputError(f"generate.py on {ranks} ranks failed ({(said or ['no message'])[0]})")
    return done


def timed(o, ranks: int, method: str) -> list[dict]:
    """The answers to all questions, as `generate.py --json` gives them."""
    asked = [word for prompt in PROMPTS[: o.questions] for word in ("--prompt", prompt)]
    done = start(o, ranks, method, *asked, "--json", "--max-new-tokens", str(o.max_new_tokens))
    return [json.loads(line) for line in done.stdout.splitlines()]


def exchange(o) -> dict:
    """What exchange.py says of as many ranks, with one thread each, and of this target's states."""
    config = read_config(o.checkpoint, "target")
    command = (*LAUNCH, str(o.ranks), str(ROOT / "benchmarks" / "exchange.py"))
    command += ("--hidden", str(config["hidden_size"]), "--rows", "1", str(TreeShape.parse(o.tree).nodes))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise InputError(f"exchange.py on {o.ranks} ranks failed (exit status {done.returncode})")
    return json.loads(done.stdout) | {"layers": config["num_layers"]}


def memory(o, ranks: int) -> float:
    """GB that the first rank has used at most, decoding a few tokens plainly."""
    done = start(o, ranks, "plain", "--prompt", PROMPTS[0], "--max-new-tokens", "4")
    return float(re.search(r"peak memory ([\d.]+) GB", done.stderr)[1])


def run(o) -> None:
    """Time all in turns; print medians, write all runs."""
    counts = (1, o.ranks)
    if o.threads % o.ranks:
        raise InputError(f"--ranks {o.ranks}: {o.threads} threads cannot be shared among so many")
    record = describe(o.threads) | {"isa": choose(None).name, "ranks": o.ranks, "tree": o.tree, "runs": []}
    for i in range(o.repeat):
        for method in METHODS:
            answers = {count: timed(o, count, method) for count in counts[:: (-1) ** i]}
            equal = [a["output_ids"] == b["output_ids"] for a, b in zip(answers[1], answers[o.ranks])]
            for count in counts:
                record["runs"].append({
                    "ranks": count, "method": method, "equal": equal, "tau": answers[count][0]["tau"],
                    "rates": [row["tokens_per_second"] for row in answers[count]],
                    "prefill": [row["prefill_seconds"] for row in answers[count]],
                })
    record["memory"] = {count: memory(o, count) for count in counts}
    record["exchange"] = exchange(o)
    print(f"{record['device']}, {record['isa']}, {o.threads} threads in all, torch {record['torch']}")
    for method in METHODS:
        for count in counts:
            runs = [one for one in record["runs"] if one["ranks"] == count and one["method"] == method]
            rate = statistics.median(rate for one in runs for rate in one["rates"])
            prefill = statistics.median(seconds for one in runs for seconds in one["prefill"])
            same = sum(sum(one["equal"]) for one in runs), sum(len(one["equal"]) for one in runs)
            print(
                f"{method:8s} {count} rank(s): {rate:6.1f} tok/s, prefill {prefill * 1e3:.0f} ms, peak memory"
                f" {record['memory'][count]:.2f} GB, texts equal {same[0]}/{same[1]}", flush=True
            )
    took = ", ".join(f"{t:.0f} µs with {n} row(s)" for n, t in record["exchange"]["microseconds"].items())
    print(f"an exchange takes {took}; a pass has {2 * record['exchange']['layers'] + 1}")
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "ranks")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--ranks", type=int, default=2, help="that the target is dealt among (default 2)")
    add("--tree", default="8,2,4", help="of EAGLE-3 (default 8,2,4)")
    add("--dtype", help="as for generate.py")
    add("--questions", type=int, default=4, help="that are answered (default 4)")
    add("--max-new-tokens", type=int, default=96)
    add("--repeat", type=int, default=3, help="runs of each kind")
    p.within("--ranks", 2, 64)
    p.within("--questions", 1, len(PROMPTS))
    p.within("--repeat", 1, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
