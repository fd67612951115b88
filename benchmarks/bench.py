"""Command line, alternating timing, tables and result files of all benchmarks.
"""
from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
WARM_UP = 16  # tokens decoded before timing starts
sys.path.insert(0, str(ROOT))  # the project, for this file and for those that import it

from common.cli import log_stderr, positive, run_command  # noqa: E402
from common.errors import InputError  # noqa: E402
from common.machine import use_threads  # noqa: E402
from evaluation.answers import rotate_left  # noqa: E402
from kernels.cpu import CpuBackend  # noqa: E402
from kernels.isa import cpuinfo  # noqa: E402

CUDA = torch.cuda.is_available()
# Processes with the same file TURNS in their environment compile concurrently and measure one at a time: each
# holds a shared lock from the start, and an exclusive one while it measures.
TURNS = os.environ.get("TURNS") and open(os.environ["TURNS"], "w")  # noqa: SIM115
if TURNS:
    fcntl.flock(TURNS, fcntl.LOCK_SH)


def wait_turn() -> None:
    """Wait for the exclusive right to measure, if TURNS is set. It is held until the process ends."""
    if TURNS:
        fcntl.flock(TURNS, fcntl.LOCK_EX)


def options(description: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with --threads and --name. name: default of --name."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--threads", type=positive, default=2, help="CPU threads (default 2)")
    p.add_argument("--name", default=name, help=f"of the result file in benchmarks/results, or OUT ({name})")
    return p


def add_model(p: argparse.ArgumentParser, **how) -> None:
    """Add --checkpoint (how: more arguments of argparse) and --shape, and require one of them."""
    one = p.add_mutually_exclusive_group(required=True)
    one.add_argument("--checkpoint", help="converted target with its EAGLE-3 head", **how)
    one.add_argument("--shape", help="random weights of a published shape, see benchmarks/shapes.py")


def run(p: argparse.ArgumentParser, action: Callable, argv: list[str] | None) -> int:
    """Parse a command line and run action(options). Return the exit status of `common.cli.run_command`."""
    o = p.parse_args(argv)

    def threaded() -> None:
        use_threads(o.threads, log_stderr)
        o.threads = torch.get_num_threads()
        action(o)

    return run_command(threaded, OSError, ValueError)


def last_isa() -> str | None:
    """Return the instruction set of the CPU kernels loaded last, None before any were."""
    return next(reversed(CpuBackend.loaded), None)


def describe(o: argparse.Namespace) -> dict:
    """Return date, device, threads and torch version, for result files."""
    on_gpu = CUDA and not (getattr(o, "device", None) or "").startswith("cpu")
    return {
        "date": datetime.date.today().isoformat(), "threads": o.threads, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else cpuinfo("model name") or platform.machine(),
    }


def write(name: str, record: dict) -> None:
    """Write NAME.json into benchmarks/results, or into the folder OUT of the environment."""
    record["isa"] = last_isa()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict, heads: Iterable[str], rows: Iterable[Iterable], digits: int = 2) -> str:
    """Return a Markdown table below a line about the machine. None gives an empty cell."""
    def cell(value: object) -> str:
        return f"{value:.{digits}f}" if isinstance(value, float) else "" if value is None else str(value)

    about = f"{record['device']}, {last_isa()}, {record['threads']} threads"
    lines = [f"{about}, torch {record['torch']}, {record['date']}", "", f"| {' | '.join(heads)} |"]
    lines.append("|---" * lines[-1].count(" | ") + "|---|")
    return "\n".join(lines + [f"| {' | '.join(map(cell, row))} |" for row in rows])


def synchronize(device: torch.device | str) -> None:
    """Wait until the device is idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], object], device: torch.device | str, repeat: int = 8) -> float:
    """Return the median seconds of a call on the device, after two warmup calls."""
    times = []
    for _ in range(2 + repeat):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def bandwidth(device: torch.device | str) -> float:
    """Return the memory bandwidth in bytes per second: the better of copying and summing a large tensor."""
    n = 2**28 if torch.device(device).type == "cuda" else 2**26
    a, b = torch.zeros(n, device=device), torch.empty(n, device=device)
    works = (lambda: b.copy_(a), 8 * n), (lambda: a.sum(), 4 * n)
    return max(moved / median_seconds(work, device) for work, moved in works)


class Decoded(NamedTuple):
    """A program's answer to one prompt."""

    ids: list[int]
    rate: float  # tokens after the first per second; 0 if there is only one token
    accept_lengths: list[int] = []  # tokens emitted by each step; empty if unknown
    steps: int = 0  # number of steps, if only this is known


Contender = Callable[[list[int], int], Decoded]  # (prompt ids, max. new tokens) -> answer


def time_in_turns(contenders: dict[str, Contender], prompts: list[list[int]], tokens: int) -> list[dict]:
    """Decode every prompt with every program, after a warmup, in rotating order.

    Return the answers to each prompt by program. Prompts with an answer of one token are skipped: they cannot
    be timed. Raise InputError if none is left.
    """
    for decode in contenders.values():
        decode(prompts[0], WARM_UP)
    wait_turn()
    rows = []
    for i, prompt in enumerate(prompts):
        answers = {name: contenders[name](prompt, tokens) for name in rotate_left(contenders, i)}
        if all(answer.rate for answer in answers.values()):
            rows.append({name: answers[name] for name in contenders})
        speeds = ", ".join(f"{name} {answer.rate:.1f}" for name, answer in answers.items())
        log_stderr(f"  {i + 1}/{len(prompts)} {speeds}")
    if not rows:
        raise InputError("all answers have one token: nothing to time")
    return rows


def tau(accept_lengths: Iterable[list[int]]) -> float:
    """Return the acceptance length: mean tokens per step over all answers. Raise InputError without steps."""
    lengths = [n for steps in accept_lengths for n in steps]
    if not lengths:
        raise InputError("all answers have one token: no acceptance length")
    return statistics.fmean(lengths)
