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

On CUDA only the step is compiled, and several steps are timed as one. A profile of one step gives verify,
draft and rest, told apart by two tiny kernels that run between them (and count in the step), and

kernels, busy     how many ran, and the sum of their milliseconds
launches, syncs   what the host asked of the driver

--top N prints the kernels that took longest.

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
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import describe, settle, write
from profiled import MarkedEagle, mark_verified, profile_step
from shapes import models_of
from torch import Tensor

from checkpoint.folder import read_config
from common.cli import dtype, note
from common.dtypes import DTYPES
from common.errors import InputError, first_line
from drafters.base import Drafter
from drafters.eagle import Eagle
from engine.api import Drafting, Target
from engine.compiling import compile_graph, unguarded
from engine.decoder import Decoder
from engine.memory import bytes_per_step
from engine.runtime import Runtime
from kernels.choose import choose_backend
from kernels.modes import MODES
from model import KVCaches, Transformer
from networks.head import Head
from sampling.options import Modes, Sampling
from tree import TreeShape

# By number of rows: plain decoding, the trees used on CPUs, the paper's.
TREES = {s[0]: TreeShape(*s) for s in ((1, 0, 0), (8, 2, 4), (12, 3, 4), (16, 3, 4), (32, 4, 8), (60, 7, 10))}
COLUMNS = (
    "mode", "batch", "context", "rows", "step", "verify", "draft", "rest", "x plain", "roof", "kernels",
    "busy", "launches", "syncs",
)
SPARE = 200  # tokens that a context leaves free below the model's maximum
ON_CUDA = 10  # steps timed as one: what launching one takes is hidden behind the step before, as in decoding


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this device moves: the better of copying (reads and writes) and of adding up."""
    return max(bench.memory_rates(device).values())


class HeldStep:
    """A decoder with one tree, held at a context of n tokens, and the parts of its step that are timed."""

    def __init__(
        self, target: Transformer, head: Head, tree: TreeShape, batch: int, longest: int, compiled: bool
    ):
        self.rows, self.batch = tree.nodes, batch
        kind = MarkedEagle if compiled and target.embed.weight.is_cuda else Eagle
        drafter = kind(head, tree) if tree.nodes > 1 else Drafter()
        self.decoder = Decoder(
            target, drafter, batch=batch, max_seq_len=longest + 64, compile=compiled, chunks=(64,), say=note
        )
        self.decoder.start([[1]] * batch, Sampling(1))
        self.profiled = self.decoder.captured is not None  # what the parts take: else they are timed alone
        self.propose, self.verify = self._propose, self._verify
        if self.decoder.compiled and not self.profiled:
            self.propose, self.verify = compile_graph(self._propose), compile_graph(self._verify)

    def hold(self, n: int) -> None:
        """Put the decoder where it is after n committed tokens."""
        state, d = self.decoder.state, self.decoder
        state.length.fill_(n)
        state.limit.fill_(d.max_seq_len - 1)
        state.done.fill_(False)
        state.n_new.fill_(min(n, d.drafter.shape.window))
        d._length, d._done, d._modes = [n] * self.batch, [False] * self.batch, Modes()
        self.span = d.span(n + d.drafter.extra_slots)

    def parts(self, n: int) -> dict[str, Callable[[], None]]:
        """What is timed at a context of n tokens."""
        self.hold(n)
        length = self.decoder.state.length.clone()

        def step() -> None:
            self.decoder._run_step(0)
            self.decoder.state.length.copy_(length)

        if self.profiled:
            return {"step": step}
        parts = {"step": step, "verify": lambda: self._run(self.verify)}
        if self.rows > 1:
            parts["draft"] = lambda: self._run(self.propose)
        return parts

    @torch.no_grad()
    def warm_up(self, contexts: list[int]) -> None:
        """Compile and capture all that is timed at these contexts."""
        for n in contexts:
            for part in self.parts(n).values():
                self.hold(n)
                for _ in range(2):
                    part()
        settle(self.decoder.device)

    def _propose(self, span: Tensor):
        return self.decoder.drafter.propose(self.decoder.state, span, None)

    def _verify(self, span: Tensor) -> Tensor:
        d = self.decoder
        positions = d.state.length[:, None] + torch.arange(d.drafter.shape.nodes, device=span.device)
        sees = torch.ones_like(positions[..., None] == positions[:, None])
        visible = d.backend.visible_slots(span, d.state.length, sees)
        tokens = torch.zeros_like(positions)
        x, _ = d.target(tokens, positions, positions, visible, d.caches, d.drafter.aux_layers)
        return d.backend.draw(d.target.logits(x), None)

    def _run(self, part: Callable[[Tensor], object]) -> None:
        with self.decoder.backend.threads():
            part(self.span)

    def bytes_read(self, n: int) -> int:
        """Bytes that a step must read at a context of n tokens: weights, live keys and values, by pass."""
        target, drafter = self.decoder.target, self.decoder.drafter
        slots, kv_dtype = min(self.decoder.slots, n + drafter.extra_slots), target.embed.weight.dtype
        cached = drafter.cached
        head_cache = sum(KVCaches.bytes(a, self.batch, slots, kv_dtype) / a.num_layers for a in cached)
        target_cache = target.cache_bytes(self.batch, slots)
        return bytes_per_step(target, drafter) + target_cache + head_cache * drafter.passes


def measure(steps: list[HeldStep], n: int, repeat: int, roof: float) -> list[dict]:
    """A row of figures for each held step, all warm, at a context of n tokens. roof: bytes per second."""
    parts = {(held, name): part for held in steps for name, part in held.parts(n).items()}
    times: dict[tuple[HeldStep, str], list[float]] = {key: [] for key in parts}
    device = steps[0].decoder.device
    with torch.no_grad():
        for _ in range(repeat):
            for (held, name), part in parts.items():
                held.hold(n)
                settle(device)
                at_once = ON_CUDA if held.profiled else 1
                with unguarded() if held.decoder.compiled else contextlib.nullcontext():
                    began = time.perf_counter()
                    for _ in range(at_once):
                        part()
                    settle(device)
                    times[held, name].append((time.perf_counter() - began) / at_once)
    rows = []
    for held in steps:
        medians = {name: statistics.median(t) for (owner, name), t in times.items() if owner is held}
        milliseconds = {name: seconds * 1e3 for name, seconds in medians.items()}
        held.hold(n)
        row = {"rows": held.rows, "batch": held.batch, "context": n, **milliseconds}
        if held.profiled:
            with torch.no_grad():
                row |= profile_step(lambda held=held: held.decoder._run_step(0), held.rows)
        else:
            row["rest"] = row["step"] - row["verify"] - row.get("draft", 0)
        row["gigabytes"] = held.bytes_read(n) / 1e9
        row["roof"] = held.bytes_read(n) / medians["step"] / roof
        rows.append(row)
    return rows


def models_for(o, mode: str, stored: str | None, kv: str = "auto") -> tuple[Transformer, Head]:
    """Target and head as a decoder would run them: on our kernels when compiling. stored: the mode of a
    quantised checkpoint. kv: see `Runtime`, which says why it may not be: InputError.
    """
    torch_dtype = getattr(torch, DTYPES[o.dtype]) if o.dtype else None
    target, head = models_of(o.checkpoint, o.shape, torch_dtype, o.device, None if mode == "none" else mode)
    runtime = Runtime(o.device, compile=o.compile, kv=kv)
    backend = choose_backend(o.device, o.compile, say=note)
    loaded = Target(Path(o.checkpoint or o.shape), runtime, target, {}, None, note, backend)
    loaded.put_on_kernels(target)
    if kv == "fp8":
        runtime.check_fp8()
        target.Caches = backend.caches[kv]
    loaded.put_on_kernels(head, int8=Drafting().int8 and mode == "none" and not stored)
    return target, head


def contexts_of(o, longest: int) -> list[int]:
    """The contexts of --context that the model can read. Raises InputError if there are none."""
    contexts = [n for n in o.context if n + SPARE <= longest]
    if not contexts:
        raise InputError(f"--context: nothing left to measure, the model reads {longest} tokens")
    if left := [n for n in o.context if n not in contexts]:
        note(f"left out, longer than the model's {longest} tokens: --context {' '.join(map(str, left))}")
    return contexts


class Limit:
    """Seconds to spend: another thing fits in if it takes no longer than the longest so far."""

    def __init__(self, seconds: float):
        self.end, self.longest = time.perf_counter() + seconds, 0.0

    def fits(self) -> bool:
        """Whether there is time for another one."""
        return time.perf_counter() + self.longest <= self.end

    @contextlib.contextmanager
    def one(self):
        """A context in which one is done."""
        began = time.perf_counter()
        yield
        self.longest = max(self.longest, time.perf_counter() - began)


def held_steps(o, limit: Limit, models: tuple[Transformer, Head], batch: int, contexts: list[int]) -> list:
    """A warm step for every tree for which there is time and memory; says what is left out."""
    steps = []
    for rows in o.rows:
        left_out = f"left out: {rows} rows, batch {batch}"
        if not limit.fits():
            note(f"{left_out}: no time (--limit {o.limit:g})")
            continue
        try:
            with limit.one():
                held = HeldStep(*models, TREES[rows], batch, max(contexts), o.compile)
                held.warm_up(contexts)
        except (ValueError, torch.OutOfMemoryError) as e:
            note(f"{left_out}: {first_line(e)}")
            continue
        steps.append(held)
    return steps


def run(o) -> None:
    """Measure every mode, batch and context; print a line per tree. Raises InputError if nothing fits."""
    limit = Limit(o.limit)
    bench.use(o.device, o.compile)
    stored = read_config(o.checkpoint, "target").get("quantization", {}).get("mode") if o.checkpoint else None
    if stored and o.modes != ["none"]:
        raise InputError(f"{o.checkpoint}: is quantised already ({stored}); leave out --modes")
    if o.autotune:
        bench.use_autotune()
    if torch.device(o.device).type == "cuda":
        mark_verified()
    roof = bandwidth(torch.device(o.device))
    model = o.shape or o.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    record = describe(o.threads) | {"model": model, "kv": o.kv, "gigabytes_per_second": roof / 1e9}
    record["rows"] = []
    print(f"{model} on {record['device']}: {roof / 1e9:.0f} GB/s")
    print(" ".join(f"{column:>8}" for column in COLUMNS))
    for mode in o.modes:
        models = models_for(o, mode, stored, o.kv)
        contexts = contexts_of(o, models[0].args.max_seq_len)
        for batch in o.batch:
            steps = held_steps(o, limit, models, batch, contexts)
            for n in contexts if steps else ():
                rows = measure(steps, n, o.repeat, roof)
                plain = next((row["step"] for row in rows if row["rows"] == 1), None)
                for row in rows:
                    row |= {"mode": stored or mode, "x plain": row["step"] / plain if plain else None}
                    show(row, o.top)
                record["rows"] += rows
                write(o.name, record)
            del steps
            gc.collect()  # compiled parts and their owner refer to each other
    if not record["rows"]:
        raise InputError("nothing could be measured; see above")


def show(row: dict, top: int) -> None:
    """Print a row of figures, and its `top` kernels."""
    print(" ".join(_cell(row.get(column)) for column in COLUMNS), flush=True)
    for name, count, milliseconds in row.get("top", ())[:top]:
        print(f"{milliseconds:12.3f} ms in {count:4d} of {name[:80]}")


def _cell(value: float | str | None) -> str:
    return f"{value:8.2f}" if isinstance(value, float) else f"{'' if value is None else value:>8}"


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "step")
    add = p.add_argument
    bench.add_model(p)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", type=dtype, help="bf16, fp16 or fp32; default: as stored, bf16 for a shape")
    choices = ("none", *MODES)
    add("--modes", nargs="+", default=["none"], choices=choices, help="quantisation of target and head")
    default_rows = [1, 8, 16, 32, 60]
    add("--kv", choices=("auto", "fp8"), default="auto", help="the target's keys and values, see generate.py")
    add("--rows", nargs="+", type=int, default=default_rows, choices=TREES, metavar="T", help="tree sizes")
    add("--context", nargs="+", type=int, default=[128, 1024, 4096], metavar="N")
    add("--batch", nargs="+", type=int, default=[1], metavar="B")
    add("--repeat", type=int, default=15)
    p.refuse(
        lambda o: min(*o.context, *o.batch, o.repeat) < 1,
        lambda o: "--context, --batch and --repeat must be at least 1",
    )
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help="prepare no tree after that")
    add("--top", type=int, default=0, metavar="N", help="on CUDA: print the N kernels that take longest")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--autotune", action="store_true", help="torch.compile times several kernels for every product")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
