"""Time of a step and of its phases, over trees, context length, batch size and precision.

    python benchmarks/step.py --checkpoint checkpoints/smollm2-135m checkpoints/smollm2-135m-w8a8
    python benchmarks/step.py --shape llama-3.1-8b --modes none int8 --context 128 4096 --batch 1 8 32
    python benchmarks/step.py --shape llama-3.2-1b --modes w4a8 --tree 1,0,0 8,6,1 --llama-bench FILE

step      a complete step of the engine, after a prompt of random ids; tree 1,0,0 is plain decoding
verify    the target's pass over the tree, timed alone
rest      step - verify: draft, accept, commit, emit
roof      achieved / measured memory bandwidth, for weights and live KV cache
--top N   on a GPU: profile of a step: number and total time of kernels, launches and synchronizations of the
          host, and the N kinds of kernels that take longest
--llama-bench    llama.cpp with random Q4_0 weights of the shape: milliseconds of a token, and of a pass over
          8 tokens

Times are medians in milliseconds; the trees of a model alternate. Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import bench  # first: it makes the modules below importable
import ours
import torch
from bench import positive, synchronize
from ours import Model, Runner, Sampling
from shapes import write_gguf

from checkpoint.load import read_config
from common.cli import log_stderr
from common.errors import InputError, first_line
from engine.drafting import read_tree
from kernels.quantized import MXFP4
from kernels.scheme import MODES
from tree import TreeShape

STEPS_PER_SAMPLE = 10 if bench.CUDA else 1  # on a GPU, the host launches the next step early
WARMUP_SAMPLES = 2


def passes_at(runner: Runner, tree: TreeShape, context: int, batch: int, args) -> ours.Passes:
    """Return the passes of a batch of random prompts after prefill."""
    rng = torch.Generator().manual_seed(context)
    size = (batch, context)
    prompts = torch.randint(runner.engine.target.args.vocab_size, size, generator=rng).tolist()
    steps = runner.passes(prompts, [Sampling(max_emitted(tree, args))] * batch)
    in_prefill = set(range(batch))
    while in_prefill:
        in_prefill -= {i for i, new in enumerate(next(steps)) if new}
    return steps


def max_emitted(tree: TreeShape, args) -> int:
    """Return the maximum number of tokens that a measurement emits."""
    return (args.repeat + WARMUP_SAMPLES + 1) * STEPS_PER_SAMPLE * (tree.depth + 2) + 2


def profile(steps: ours.Passes) -> dict:
    """Return what a step does on a GPU: kernels, busy milliseconds, launches, syncs, and its top kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS_PER_SAMPLE):
            next(steps)
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us() / 1e3 / STEPS_PER_SAMPLE
            counts[event.name] += 1 / STEPS_PER_SAMPLE
    names = [event.name for event in profiler.events()]
    launches = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")
    return {
        "kernels": counts.total(), "busy": times.total(),
        "launches": sum(name.startswith(launches) for name in names) / STEPS_PER_SAMPLE,
        "syncs": (sum("Synchronize" in name for name in names) - 1) / STEPS_PER_SAMPLE,  # without our own
        "top": [(name, counts[name], ms) for name, ms in times.most_common()],
    }


def measure(model: Model, trees: list[TreeShape], batch: int, args) -> Iterator[dict]:
    """Yield a row for each tree and context. Log those that do not fit."""
    emitted = max_emitted(max(trees, key=lambda t: t.depth), args)
    contexts = [n for n in args.context if n + emitted < model.longest]
    if len(contexts) < len(args.context):
        log_stderr(f"skipped: contexts beyond the model's {model.longest} tokens")
    runners: dict[TreeShape, Runner] = {}
    for tree in trees:
        try:
            method = ("eagle3", tree) if tree.nodes > 1 else ("none",)
            longest = max(contexts, default=1) + max_emitted(tree, args)
            runner = model.runner(*method, batch=batch, max_seq_len=longest, stops=False)
            if not args.check:
                runner.engine.self_check = None
            # With our kernels, one graph serves every length.
            runners[tree] = runner.warm_up(exhaustive=not runner.engine.runner.device_step.reads_length)
        except (ValueError, torch.OutOfMemoryError) as e:
            log_stderr(f"skipped: tree {tree.name}, batch {batch}: {first_line(e)}")
    bench.wait_turn()
    for n in contexts:
        steps = {tree: passes_at(runner, tree, n, batch, args) for tree, runner in runners.items()}
        times: dict[TreeShape, list[float]] = {tree: [] for tree in steps}
        for turn in range(WARMUP_SAMPLES + args.repeat):
            for tree, passes in steps.items():
                synchronize(model.device)
                start_time = time.perf_counter()
                for _ in range(STEPS_PER_SAMPLE):
                    next(passes)
                synchronize(model.device)
                if turn >= WARMUP_SAMPLES:
                    times[tree].append((time.perf_counter() - start_time) / STEPS_PER_SAMPLE)
        plain = next((statistics.median(t) for tree, t in times.items() if tree.nodes == 1), None)
        for tree, passes in steps.items():
            step, read = statistics.median(times[tree]), runners[tree].bytes_read(n)
            row = {"batch": batch, "context": n, "tree": tree.name, "rows": tree.nodes, "step": step * 1e3}
            verify = runners[tree].verify_seconds(n, args.repeat)
            row |= {"verify": verify * 1e3, "rest": (step - verify) * 1e3}
            row |= {"x plain": plain and step / plain, "gigabytes": read / 1e9}
            yield row | (profile(passes) if args.top and bench.CUDA else {})
            passes.close()


def llama_bench(args, file: Path) -> dict[str, float]:
    """Return llama.cpp's milliseconds per token, and per pass over 8 tokens. Raise InputError."""
    times = {}
    for name, tokens, *options in (
        ("token", 1, "-p", "0", "-n", "32"), ("8 rows", 8, "-p", "8", "-n", "0")
    ):
        command = [args.llama_bench, "-m", file, "-t", str(args.threads), "-r", str(args.repeat)]
        command += ["-o", "json", *options]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            times[name] = 1e3 * tokens / json.loads(result.stdout)[0]["avg_ts"]
        except (OSError, subprocess.CalledProcessError, ValueError, LookupError) as e:
            last = (getattr(e, "stderr", None) or str(e)).strip().splitlines()[-1]
            raise InputError(f"--llama-bench {args.llama_bench}: {last}") from None
    return times


def action(args) -> None:
    """Measure every model, batch, tree and context. Print the table."""
    if args.llama_bench and not args.shape:
        raise InputError("--llama-bench: runs random weights; pass --shape")
    runtime = {"device": args.device, "kv": args.kv, "isa": args.isa, "autotune": args.autotune}
    runtime |= {"compile": args.compile, "kernels": args.kernels}
    trees = [read_tree(spec) for spec in args.tree]
    rows, roof = [], 0.0
    record = bench.describe(args) | {"kv": args.kv, "model": args.checkpoint or args.shape}
    for source in args.checkpoint or args.modes:
        if args.checkpoint:
            mode = read_config(source, "target").get("quantization", {}).get("mode", "none")
            model = ours.load(source, **runtime)
        else:
            mode, model = source, ours.load(None, args.shape, None if source == "none" else source, **runtime)
        for batch in args.batch:
            for row in measure(model, trees, batch, args):
                roof = roof or bench.bandwidth(model.device)
                row["roof"] = row["gigabytes"] * 1e12 / row["step"] / roof
                rows.append({"mode": mode, **row})
                bench.write(args.name, record | {"gigabytes_per_second": roof / 1e9, "rows": rows})
                at = f"tree {row['tree']}, batch {batch}, context {row['context']}"
                launched = f", {row['kernels']:.0f} kernels" if "kernels" in row else ""
                log_stderr(f"  {mode}, {at}: {row['step']:.2f} ms, verify {row['verify']:.2f}{launched}")
            gc.collect()  # compiled modules are in reference cycles
        del model
    if not rows:
        raise InputError("nothing was measured, see the messages above")
    print(f"memory: {roof / 1e9:.0f} GB/s")
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column != "top"]
    print(bench.table(record, columns, [[row.get(column) for column in columns] for row in rows]))
    for row in rows if args.top else ():
        for name, count, milliseconds in row.get("top", ())[: args.top]:
            print(f"{row['tree']}: {milliseconds:.3f} ms in {count:.0f} of {name[:80]}")
    if args.llama_bench:
        with tempfile.TemporaryDirectory() as folder:
            write_gguf(args.shape, Path(folder) / "shape.gguf")
            record["llama.cpp"] = llama_bench(args, Path(folder) / "shape.gguf")
        print("llama.cpp:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in record["llama.cpp"].items()))
        bench.write(args.name, record | {"gigabytes_per_second": roof / 1e9, "rows": rows})


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "step")
    add = p.add_argument
    bench.add_model(p, nargs="+")
    add("--modes", nargs="+", default=["none"], choices=("none", *MODES, MXFP4),
        help="quantization modes of a shape's weights (default none)")
    add("--tree", nargs="+", default=["1,0,0", "8,2,4", "12,3,4", "60,7,10"], metavar="T,D,K")
    add("--context", nargs="+", type=positive, default=[128, 1024, 4096], metavar="N")
    add("--batch", nargs="+", type=positive, default=[1], metavar="B")
    add("--repeat", type=positive, default=15)
    add("--top", type=int, default=0, metavar="N", help="on a GPU: profile, print the N longest kernels")
    add("--llama-bench", metavar="FILE", help="llama.cpp's llama-bench; only with --shape")
    add("--device", help="device (default: cuda if available, else cpu)")
    add("--kv", choices=("auto", "int8", "fp8"), default="auto", help="KV cache, see generate.py")
    add("--isa", help="instruction set of the CPU kernels (default: the best)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--kernels", action=argparse.BooleanOptionalAction, default=True)
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="check a GPU's kernels first")
    add("--autotune", action="store_true", help="torch.compile benchmarks several kernels for every matmul")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
