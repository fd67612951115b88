"""Command line, alternating timing, tables and result files of all benchmarks."""
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
sys.path.insert(0, str(ROOT))  # makes the project importable, also in files that import this one

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
    p.add_argument("--name", default=name, help=f"name of the result file (default {name})")
    return p


def add_model(p: argparse.ArgumentParser, **checkpoint_options) -> None:
    """Add --checkpoint, with these options of argparse, and --shape. Require one of them."""
    group = p.add_mutually_exclusive_group(required=True)
    group.add_argument("--checkpoint", help="converted target with its EAGLE-3 head", **checkpoint_options)
    group.add_argument("--shape", help="random weights of a published shape, see benchmarks/shapes.py")


def run(p: argparse.ArgumentParser, action: Callable, argv: list[str] | None) -> int:
    """Parse a command line and run action(options). Return the exit status of `common.cli.run_command`."""
    args = p.parse_args(argv)

    def run_with_threads() -> None:
        use_threads(args.threads, log_stderr)
        args.threads = torch.get_num_threads()
        action(args)

    return run_command(run_with_threads, OSError, ValueError)


def last_isa() -> str | None:
    """Return the instruction set of the CPU kernels loaded last, None if there is none."""
    return next(reversed(CpuBackend.loaded), None)


def describe(args: argparse.Namespace) -> dict:
    """Return date, device, threads and torch version, for result files."""
    on_gpu = CUDA and not (getattr(args, "device", None) or "").startswith("cpu")
    return {
        "date": datetime.date.today().isoformat(), "threads": args.threads, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else cpuinfo("model name") or platform.machine(),
    }


def write(name: str, record: dict) -> None:
    """Write NAME.json into benchmarks/results, or into the folder OUT of the environment."""
    record["isa"] = last_isa()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def table(record: dict, columns: Iterable[str], rows: Iterable[Iterable], digits: int = 2) -> str:
    """Return a Markdown table below a line machine the machine. None gives an empty cell."""
    def cell(value: object) -> str:
        return f"{value:.{digits}f}" if isinstance(value, float) else "" if value is None else str(value)

    machine = f"{record['device']}, {last_isa()}, {record['threads']} threads"
    lines = [f"{machine}, torch {record['torch']}, {record['date']}", "", f"| {' | '.join(columns)} |"]
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
        start_time = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start_time)
    return statistics.median(times[2:])


def bandwidth(device: torch.device | str) -> float:
    """Return the memory bandwidth in bytes per second: the better of copying and summing a large tensor."""
    n = 2**28 if torch.device(device).type == "cuda" else 2**26
    a, b = torch.zeros(n, device=device), torch.empty(n, device=device)
    operations = (lambda: b.copy_(a), 8 * n), (lambda: a.sum(), 4 * n)
    return max(moved / median_seconds(call, device) for call, moved in operations)


class Decoded(NamedTuple):
    """A program's answer to one prompt."""

    ids: list[int]
    rate: float  # tokens per second after the first; 0 if there is only one
    accept_lengths: list[int] = []  # tokens emitted by each step; empty if unknown
    steps: int = 0  # number of steps, if accept_lengths is unknown


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
