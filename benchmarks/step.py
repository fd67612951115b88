"""What a step costs, and where the time goes, over tree sizes, context, batch and quantisation.

    python benchmarks/step.py --checkpoint checkpoints/smollm2-135m
    python benchmarks/step.py --shape llama-3.1-8b --modes none int8 --context 128 1024 4096 --batch 1 8 32

step      the complete step as the decoder runs it (on CUDA: one captured graph); 1 row is plain decoding
verify    the target's pass over the tree, timed alone
draft     the head's passes, timed alone
rest      step - verify - draft: accepting, committing, emitting. It can be below zero: on a CPU a part that
          is timed alone goes through torch.compile, which takes up to half a millisecond that the step saves
roof      the share of the device's measured memory bandwidth that the step reads at (weights once per pass,
          live keys and values)
launches, syncs   on CUDA: what the host asks of the driver in one step

Times are medians in milliseconds. The trees of one model take turns, so that a machine that is slow for a
while is slow for all of them. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable

import bench  # first: it makes the modules below importable
import torch
from bench import describe, settle, write
from shapes import models_of
from torch import Tensor

from checkpoint.folder import read_config
from common.cli import dtype, note
from common.dtypes import DTYPES
from common.errors import InputError
from drafters.base import Drafter
from drafters.eagle import Eagle
from engine.compiling import compile_graph, unguarded
from engine.decoder import Decoder
from engine.memory import bytes_per_step
from engine.runtime import check_device
from kernels.cpu import load_kernels
from kernels.packed import pack_models, threads_for
from kernels.parts import draw, visible_slots
from kernels.quantized import MODES, Scheme, quantize_linears
from model import KVCache, Transformer
from networks.head import Head
from sampling.options import Sampling
from tree import TreeShape

# By number of rows: plain decoding, the trees used on CPUs, the paper's.
TREES = {s[0]: TreeShape(*s) for s in ((1, 0, 0), (8, 2, 4), (12, 3, 4), (16, 3, 4), (32, 4, 8), (60, 7, 10))}
COLUMNS = (
    "mode", "batch", "context", "rows", "step", "verify", "draft", "rest", "x plain", "roof", "launches",
    "syncs",
)
SPARE = 200  # tokens that a context leaves free below the model's maximum


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this device moves: the better of copying (reads and writes) and of adding up."""
    n = 2**28 if device.type == "cuda" else 2**26
    a, b = torch.zeros(n, device=device), torch.empty(n, device=device)
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


class HeldStep:
    """A decoder with one tree, held at a context of n tokens, and the parts of its step that are timed."""

    def __init__(
        self, target: Transformer, head: Head, tree: TreeShape, batch: int, longest: int, compiled: bool
    ):
        self.rows, self.batch = tree.nodes, batch
        drafter = Eagle(head, tree) if tree.nodes > 1 else Drafter()
        self.decoder = Decoder(
            target, drafter, batch=batch, max_seq_len=longest + 64, compile=compiled, chunks=(64,), say=note
        )
        self.decoder.start([[1]] * batch, Sampling(1))
        self.propose, self.verify = self._propose, self._verify
        if self.decoder.compiled:
            self.propose, self.verify = compile_graph(self._propose), compile_graph(self._verify)
        self.graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}

    def hold(self, n: int) -> None:
        """Put the decoder where it is after n committed tokens."""
        state, d = self.decoder.state, self.decoder
        state.length.fill_(n)
        state.limit.fill_(d.max_seq_len - 1)
        state.done.fill_(False)
        state.n_new.fill_(min(n, d.drafter.shape.window))
        d._length, d._done, d._modes = [n] * self.batch, [False] * self.batch, (False, False)
        self.span = d._span(n + d.drafter.extra_slots)

    def parts(self, n: int) -> dict[str, Callable[[], None]]:
        """What is timed at a context of n tokens."""
        self.hold(n)
        length = self.decoder.state.length.clone()

        def step() -> None:
            self.decoder._run_step(0)
            self.decoder.state.length.copy_(length)

        parts = {"step": step, "verify": lambda: self._run("verify", self.verify)}
        if self.rows > 1:
            parts["draft"] = lambda: self._run("draft", self.propose)
        return parts

    def _propose(self, span: Tensor):
        return self.decoder.drafter.propose(self.decoder.state, span, None)

    def _verify(self, span: Tensor) -> Tensor:
        d = self.decoder
        positions = d.state.length[:, None] + torch.arange(d.drafter.shape.nodes, device=span.device)
        sees = torch.ones_like(positions[..., None] == positions[:, None])
        visible = visible_slots(span, d.state.length, sees)
        tokens = torch.zeros_like(positions)
        x, _ = d.target(tokens, positions, positions, visible, d.caches, d.drafter.aux_layers)
        return draw(d.target.logits(x), None)

    def _run(self, name: str, part: Callable[[Tensor], object]) -> None:
        """Run a part; on CUDA as a captured graph, which it is in the step too."""
        if self.decoder.device.type != "cuda" or not self.decoder.compiled:
            with threads_for(self.decoder.target):
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

    def bytes_read(self, n: int) -> int:
        """Bytes that a step must read at a context of n tokens: weights, live keys and values, by pass."""
        target, drafter = self.decoder.target, self.decoder.drafter
        slots, kv_dtype = min(self.decoder.slots, n + drafter.extra_slots), target.embed.weight.dtype
        head_cache = sum(KVCache.bytes(self.batch, slots, args, kv_dtype) for args in drafter.cached)
        target_cache = target.cache_bytes(self.batch, slots)
        return bytes_per_step(target, drafter) + target_cache + head_cache * drafter.passes


def host_calls(held: HeldStep) -> dict[str, int]:
    """What one step asks of the CUDA driver: launches (graphs and single kernels) and synchronisations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        held.decoder._run_step(0)
    names = [event.name for event in profiled.events()]
    launches = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")
    return {
        "launches": sum(name.startswith(launches) for name in names),
        # The profiler waits once itself, at its end.
        "syncs": max(0, sum("Synchronize" in name for name in names) - 1),
    }


def measure(steps: list[HeldStep], n: int, repeat: int, roof: float) -> list[dict]:
    """A row of figures for each held step at a context of n tokens. roof: bytes per second."""
    parts = {(held, name): part for held in steps for name, part in held.parts(n).items()}
    times: dict[tuple[HeldStep, str], list[float]] = {key: [] for key in parts}
    device = steps[0].decoder.device
    with torch.no_grad():
        for (held, _), part in parts.items():
            held.hold(n)
            for _ in range(2):  # compile and warm up
                part()
        for _ in range(repeat):
            for (held, name), part in parts.items():
                held.hold(n)
                settle(device)
                with unguarded() if held.decoder.compiled else contextlib.nullcontext():
                    began = time.perf_counter()
                    part()
                    settle(device)
                    times[held, name].append(time.perf_counter() - began)
    rows = []
    for held in steps:
        medians = {name: statistics.median(t) for (owner, name), t in times.items() if owner is held}
        milliseconds = {name: seconds * 1e3 for name, seconds in medians.items()}
        held.hold(n)
        row = {"rows": held.rows, "batch": held.batch, "context": n, **milliseconds}
        row["rest"] = row["step"] - row["verify"] - row.get("draft", 0)
        row["gigabytes"] = held.bytes_read(n) / 1e9
        row["roof"] = held.bytes_read(n) / medians["step"] / roof
        if device.type == "cuda":
            with torch.no_grad():
                row |= host_calls(held)
        rows.append(row)
    return rows


def models_for(o, mode: str, stored: str | None) -> tuple[Transformer, Head]:
    """Target and head as a decoder would run them: on the CPU kernels when compiling. stored: the mode of a
    quantised checkpoint.
    """
    torch_dtype = getattr(torch, DTYPES[o.dtype]) if o.dtype else None
    target, head = models_of(o.checkpoint, o.shape, torch_dtype, o.device, None if mode == "none" else mode)
    if torch.device(o.device).type == "cpu" and o.compile:
        load_kernels(note)
        if mode == "none" and not stored and target.embed.weight.dtype == torch.bfloat16:
            # the default of `engine.api.Drafting`
            quantize_linears(head, Scheme("int8", 0, "int8" if head.args.own_lm_head else None))
        pack_models(target, head)
    return target, head


def contexts_of(o, longest: int) -> list[int]:
    """The contexts of --context that the model can read. Raises InputError if there are none."""
    contexts = [n for n in o.context if n + SPARE <= longest]
    if not contexts:
        raise InputError(f"--context: nothing left to measure, the model reads {longest} tokens")
    if left := [n for n in o.context if n not in contexts]:
        note(f"left out, longer than the model's {longest} tokens: --context {' '.join(map(str, left))}")
    return contexts


def run(o) -> None:
    """Measure every mode, batch and context; print a line per tree."""
    check_device(o.device)
    stored = read_config(o.checkpoint, "target").get("quantization", {}).get("mode") if o.checkpoint else None
    if stored and o.modes != ["none"]:
        raise InputError(f"{o.checkpoint}: is quantised already ({stored}); leave out --modes")
    roof = bandwidth(torch.device(o.device))
    model = o.shape or o.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    record = describe(o.threads) | {"model": model, "gigabytes_per_second": roof / 1e9, "rows": []}
    print(f"{model} on {record['device']}: {roof / 1e9:.0f} GB/s")
    print(" ".join(f"{column:>8}" for column in COLUMNS))
    for mode in o.modes:
        target, head = models_for(o, mode, stored)
        contexts = contexts_of(o, target.args.max_seq_len)
        for batch in o.batch:
            steps = [HeldStep(target, head, TREES[rows], batch, max(contexts), o.compile) for rows in o.rows]
            for n in contexts:
                rows = measure(steps, n, o.repeat, roof)
                plain = next((row["step"] for row in rows if row["rows"] == 1), None)
                for row in rows:
                    row |= {"mode": stored or mode, "x plain": row["step"] / plain if plain else None}
                    print(" ".join(_cell(row.get(column)) for column in COLUMNS), flush=True)
                record["rows"] += rows
                write(o.name, record)
            del steps
            gc.collect()  # compiled parts and their owner refer to each other


def _cell(value: float | str | None) -> str:
    return f"{value:8.2f}" if isinstance(value, float) else f"{'' if value is None else value:>8}"


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "step")
    add = p.add_argument
    add("--checkpoint", help="converted target with its EAGLE-3 head")
    add("--shape", help="instead: a published shape with random weights (see benchmarks/shapes.py)")
    p.refuse(
        lambda o: bool(o.checkpoint) == bool(o.shape), lambda o: "give --checkpoint DIR or --shape NAME"
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", type=dtype, help="bf16, fp16 or fp32; default: as stored, bf16 for a shape")
    choices = ("none", *MODES)
    add("--modes", nargs="+", default=["none"], choices=choices, help="quantisation of target and head")
    default_rows = [1, 8, 16, 32, 60]
    add("--rows", nargs="+", type=int, default=default_rows, choices=TREES, metavar="T", help="tree sizes")
    add("--context", nargs="+", type=int, default=[128, 1024, 4096], metavar="N")
    add("--batch", nargs="+", type=int, default=[1], metavar="B")
    add("--repeat", type=int, default=15)
    p.refuse(
        lambda o: min(*o.context, *o.batch, o.repeat) < 1,
        lambda o: "--context, --batch and --repeat must be at least 1",
    )
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
