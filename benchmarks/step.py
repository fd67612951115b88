"""What a step costs, and where the time goes: plain and speculative, over tree sizes, context, batch and
quantisation.

    python benchmarks/step.py --checkpoint checkpoints/smollm2-135m
    python benchmarks/step.py --shape llama-3.1-8b --modes none int8 --context 128 1024 4096 16384 --batch 1 8 32

`step` is the whole step as the decoder runs it (on CUDA: one captured graph), `verify` the target's pass over
the tree, `draft` the head's passes, each timed alone, through torch.compile, which costs up to half a
millisecond a call on a CPU that the step is spared; `rest` is what is left, accepting, committing, emitting,
and so less than nothing where that is more. `roof` is the share of the device's measured memory bandwidth
that the step's reads (weights once per pass, live keys and values) come to. On CUDA `launches` and `syncs`
count what the host asks of the driver in one step. Times are medians of turns: the trees of one model take
turns, so that a machine that is slow for a while is slow for all. Raw figures go to
benchmarks/results/NAME.json.
"""
from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from bench import describe, write  # first: it makes the modules below importable
from shapes import models_of

from checkpoint.folder import read_config
from common.cli import run_command
from common.errors import InputError
from drafters.base import Drafter
from drafters.eagle import Eagle
from engine.compiling import compile_graph, unguarded
from engine.decoder import Decoder
from engine.memory import bytes_per_step
from engine.runtime import check_device
from kernels.cpu import load_kernels
from kernels.packed import pack
from kernels.quantized import MODES, quantize_linears
from model import cache_bytes
from sampling.options import Sampling
from tree import TreeShape, visible_slots

# Of so many rows: the shapes that are used on CPUs, and the paper's. 1 is plain decoding.
TREES = {s[0]: TreeShape(*s) for s in ((1, 0, 0), (8, 2, 4), (12, 3, 4), (16, 3, 4), (32, 4, 8), (60, 7, 10))}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: torch.device) -> float:
    """Bytes per second this device moves: the better of copying (reads and writes) and of adding up."""
    n = 2**28 if device.type == "cuda" else 2**26
    a, b = torch.zeros(
        n, dtype=torch.float32, device=device
    ), torch.empty(n, dtype=torch.float32, device=device)
    rates = []
    for work, moved in ((lambda: b.copy_(a), 8 * n), (lambda: a.sum(), 4 * n)):
        times = []
        for _ in range(8):
            settle(device)
            began = time.perf_counter()
            work()
            settle(device)
            times.append(time.perf_counter() - began)
        rates.append(moved / statistics.median(times[2:]))
    return max(rates)


class Subject:
    """One tree on one model: its decoder held at a context of n tokens, and the parts of its step to be
    timed.
    """

    def __init__(self, target, head, rows: int, batch: int, longest: int, compiled: bool):
        shape = TREES[rows]
        self.rows, self.batch = rows, batch
        drafter = Eagle(head, shape) if rows > 1 else Drafter()
        self.decoder = Decoder(
            target, drafter, batch=batch, max_seq_len=longest + 64, compile=compiled, chunks=(64,), say=say
        )
        self.decoder.start([[1]] * batch, Sampling(1))
        self.propose, self.verify = self._propose, self._verify
        if compiled:
            self.propose, self.verify = (compile_graph(f) for f in (self._propose, self._verify))
        self.graphs: dict = {}

    def hold(self, n: int) -> None:
        """As if n tokens were committed."""
        state, d = self.decoder.state, self.decoder
        state.length.fill_(n)
        state.limit.fill_(d.max_seq_len - 1)
        state.done.fill_(False)
        state.n_new.fill_(min(n, d.drafter.shape.window))
        d._length, d._done, d._modes = [n] * self.batch, [False] * self.batch, (False, False)
        self.span = d._span(n + d.drafter.room)

    def step(self) -> None:
        """The whole step, then back to where it was."""
        self.decoder._run_step(0)
        self.decoder.state.length.copy_(self.length)

    def _propose(self, span):
        return self.decoder.drafter.propose(self.decoder.state, span, None)

    def _verify(self, span):
        d = self.decoder
        own = d.state.length[:, None] + torch.arange(d.drafter.shape.nodes, device=span.device)
        sees = torch.ones_like(own[..., None] == own[:, None])
        visible = visible_slots(span, d.state.length, sees)
        x, _ = d.target(torch.zeros_like(own), own, own, visible, d.caches, d.drafter.aux_layers)
        return d.target.logits(x).argmax(-1)

    def parts(self, n: int) -> dict[str, Callable]:
        """What is timed at this context."""
        self.hold(n)
        self.length = self.decoder.state.length.clone()
        found = {"step": self.step, "verify": lambda: self.run("verify", self.verify)}
        if self.rows > 1:
            found["draft"] = lambda: self.run("draft", self.propose)
        return found

    def run(self, name: str, part: Callable) -> None:
        """A part; on CUDA as a graph of its own, as it is inside the step's."""
        if self.decoder.device.type != "cuda" or not self.decoder.compiled:
            part(self.span)
            return
        key = name, self.span.shape[0]
        if key not in self.graphs:
            for _ in range(3):
                part(self.span)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                part(self.span)
            self.graphs[key] = graph
        self.graphs[key].replay()

    def read(self, n: int) -> int:
        """Bytes a step must read: weights by pass, live keys and values of target and head."""
        d, dtype = self.decoder, self.decoder.target.embed.weight.dtype
        slots = min(d.slots, n + d.drafter.room)
        target = cache_bytes(self.batch, slots, d.target.args, dtype) * d.target.args.num_layers
        return bytes_per_step(d) + target + sum(
            cache_bytes(self.batch, slots, a, dtype) for a in d.drafter.cached
        ) * d.drafter.passes


def host_calls(subject: Subject) -> dict[str, int]:
    """What one step asks of the CUDA driver: launches (graphs and single kernels) and synchronisations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        subject.decoder._run_step(0)
    names = [e.name for e in seen.events()]
    return {
        "launches": sum(
            n.startswith(("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")) for n in names
        ),
        # The profiler waits once itself, at its end.
        "syncs": max(0, sum("Synchronize" in n for n in names) - 1),
    }


def measure(subjects: list[Subject], n: int, repeat: int, roof: float) -> list[dict]:
    """All subjects at a context of n tokens, in turns."""
    calls = {(s, name): call for s in subjects for name, call in s.parts(n).items()}
    times: dict = {key: [] for key in calls}
    device = subjects[0].decoder.device
    with torch.no_grad():
        for (s, _), call in calls.items():
            s.hold(n)
            for _ in range(2):
                call()
        for _ in range(repeat):
            for key, call in calls.items():
                key[0].hold(n)
                settle(device)
                with unguarded():
                    began = time.perf_counter()
                    call()
                    settle(device)
                    times[key].append(time.perf_counter() - began)
    found = []
    for s in subjects:
        middle = {name: statistics.median(t) for (owner, name), t in times.items() if owner is s}
        s.hold(n)
        row = {
            "rows": s.rows, "batch": s.batch, "context": n, **{name: t * 1e3 for name, t in middle.items()}
        }
        row["rest"] = row["step"] - row["verify"] - row.get("draft", 0)
        row["gigabytes"] = s.read(n) / 1e9
        row["roof"] = s.read(n) / middle["step"] / roof
        if device.type == "cuda":
            with torch.no_grad():
                row |= host_calls(s)
        found.append(row)
    return found


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", help="converted target with its EAGLE-3 head")
    p.add_argument(
        "--shape", help="instead: a published shape with random weights (see benchmarks/shapes.py)"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=("bf16", "fp32"), help="default: as stored, bf16 for a shape")
    p.add_argument(
        "--modes", nargs="+", default=["none"], choices=("none", *MODES),
        help="quantisation of target and head"
    )
    p.add_argument(
        "--rows", nargs="+", type=int, default=[1, 8, 16, 32, 60], choices=TREES, metavar="T",
        help="nodes of the trees"
    )
    p.add_argument("--context", nargs="+", type=int, default=[128, 1024, 4096], metavar="N")
    p.add_argument("--batch", nargs="+", type=int, default=[1], metavar="B")
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--name", default="step", help="of the file under benchmarks/results")
    o = p.parse_args(argv)
    return run_command(lambda: sweep(o), OSError, ValueError)


def sweep(o) -> None:
    """Every mode, batch and context; a line per tree."""
    if bool(o.checkpoint) == bool(o.shape):
        raise InputError("give --checkpoint DIR or --shape NAME")
    if min(o.context) < 1 or min(o.batch) < 1 or o.repeat < 1 or o.threads < 1:
        raise InputError("--context, --batch, --repeat and --threads must be at least 1")
    torch.set_num_threads(o.threads)
    check_device(o.device)
    device, dtype = torch.device(o.device), {
        "bf16": torch.bfloat16, "fp32": torch.float32, None: None
    }[o.dtype]
    stored = read_config(o.checkpoint, "target").get("quantization", {}).get("mode") if o.checkpoint else None
    if stored and o.modes != ["none"]:
        raise InputError(f"{o.checkpoint}: is quantised already ({stored}); leave out --modes")
    roof = bandwidth(device)
    model = o.shape or o.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    record = describe(o.threads) | {"model": model, "gigabytes_per_second": roof / 1e9, "rows": []}
    print(f"{model} on {record['device']}: {roof / 1e9:.0f} GB/s")
    columns = [
        "mode", "batch", "context", "rows", "step", "verify", "draft", "rest", "x plain", "roof", "launches",
        "syncs"
    ]
    print(" ".join(f"{c:>8}" for c in columns))
    for mode in o.modes:
        target, head = models_of(o.checkpoint, o.shape, dtype, o.device, None if mode == "none" else mode)
        if device.type == "cpu" and o.compile:
            load_kernels(say)
            if mode == "none" and not stored and target.embed.weight.dtype == torch.bfloat16:
                quantize_linears(head, head.args.own_lm_head)  # as text.load does
            pack(target, head)
        longest = target.args.max_seq_len
        contexts = [n for n in o.context if n + 200 <= longest]
        if left := [n for n in o.context if n not in contexts]:
            say(f"left out, longer than the model's {longest} tokens: --context {' '.join(map(str, left))}")
        if not contexts:
            raise InputError(f"--context: nothing left to measure, the model reads {longest} tokens")
        for batch in o.batch:
            subjects = [Subject(target, head, rows, batch, max(contexts), o.compile) for rows in o.rows]
            for n in contexts:
                rows = measure(subjects, n, o.repeat, roof)
                plain = next((r["step"] for r in rows if r["rows"] == 1), None)
                for row in rows:
                    row |= {"mode": stored or mode, "x plain": row["step"] / plain if plain else None}
                    shown = ["" if row.get(c) is None else row[c] for c in columns]
                    print(
                        " ".join(f"{v:8.2f}" if isinstance(v, float) else f"{v:>8}" for v in shown),
                        flush=True
                    )
                record["rows"] += rows
                write(o.name, record)
            del subjects
            gc.collect()  # compiled parts and their owner refer to each other


if __name__ == "__main__":
    sys.exit(main())
