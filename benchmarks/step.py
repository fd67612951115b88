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

STEPS_PER_SAMPLE = 10 if bench.CUDA else 1  # a GPU's host launches a step ahead
WARMUP_SAMPLES = 2


def passes_at(runner: Runner, tree: TreeShape, context: int, batch: int, o) -> ours.Passes:
    """Return the passes of a batch of random prompts, from the first step on."""
    draw = torch.Generator().manual_seed(context)
    size = (batch, context)
    prompts = torch.randint(runner.engine.target.args.vocab_size, size, generator=draw).tolist()
    steps = runner.passes(prompts, [Sampling(max_emitted(tree, o))] * batch)
    waiting = set(range(batch))
    while waiting:
        waiting -= {i for i, new in enumerate(next(steps)) if new}
    return steps


def max_emitted(tree: TreeShape, o) -> int:
    """Return the maximum number of tokens that a measurement emits."""
    return (o.repeat + WARMUP_SAMPLES + 1) * STEPS_PER_SAMPLE * (tree.depth + 2) + 2


def profile(steps: ours.Passes) -> dict:
    """Return what a step does on a GPU: kernels, busy milliseconds, launches, syncs, and its top kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS_PER_SAMPLE):
            next(steps)
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for event in seen.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us() / 1e3 / STEPS_PER_SAMPLE
            counts[event.name] += 1 / STEPS_PER_SAMPLE
    names = [event.name for event in seen.events()]
    launches = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")
    return {
        "kernels": counts.total(), "busy": times.total(),
        "launches": sum(name.startswith(launches) for name in names) / STEPS_PER_SAMPLE,
        "syncs": (sum("Synchronize" in name for name in names) - 1) / STEPS_PER_SAMPLE,  # one is ours
        "top": [(name, counts[name], ms) for name, ms in times.most_common()],
    }


def measure(model: Model, trees: list[TreeShape], batch: int, o) -> Iterator[dict]:
    """Yield a row for each tree and context. Print what does not fit."""
    contexts = [n for n in o.context if n + max_emitted(max(trees, key=lambda t: t.depth), o) < model.longest]
    if len(contexts) < len(o.context):
        log_stderr(f"left out: contexts beyond the model's {model.longest} tokens")
    runners: dict[TreeShape, Runner] = {}
    for tree in trees:
        try:
            how = ("eagle3", tree) if tree.nodes > 1 else ("none",)
            longest = max(contexts, default=1) + max_emitted(tree, o)
            runner = model.runner(*how, batch=batch, max_seq_len=longest, stops=False)
            if not o.check:
                runner.engine.self_check = None
            # On our kernels one graph serves every length, and nothing else is timed.
            runners[tree] = runner.warm_up(every=not runner.engine.runner.device_step.reads_length)
        except (ValueError, torch.OutOfMemoryError) as e:
            log_stderr(f"left out: tree {tree.name}, batch {batch}: {first_line(e)}")
    bench.wait_turn()
    for n in contexts:
        steps = {tree: passes_at(runner, tree, n, batch, o) for tree, runner in runners.items()}
        times: dict[TreeShape, list[float]] = {tree: [] for tree in steps}
        for turn in range(WARMUP_SAMPLES + o.repeat):
            for tree, passes in steps.items():
                synchronize(model.device)
                began = time.perf_counter()
                for _ in range(STEPS_PER_SAMPLE):
                    next(passes)
                synchronize(model.device)
                if turn >= WARMUP_SAMPLES:
                    times[tree].append((time.perf_counter() - began) / STEPS_PER_SAMPLE)
        plain = next((statistics.median(t) for tree, t in times.items() if tree.nodes == 1), None)
        for tree, passes in steps.items():
            step, read = statistics.median(times[tree]), runners[tree].bytes_read(n)
            row = {"batch": batch, "context": n, "tree": tree.name, "rows": tree.nodes, "step": step * 1e3}
            verify = runners[tree].verify_seconds(n, o.repeat)
            row |= {"verify": verify * 1e3, "rest": (step - verify) * 1e3}
            row |= {"x plain": plain and step / plain, "gigabytes": read / 1e9}
            yield row | (profile(passes) if o.top and bench.CUDA else {})
            passes.close()


def llama_bench(o, file: Path) -> dict[str, float]:
    """Return milliseconds of llama.cpp's plain token and of its pass over 8 rows. Raise InputError."""
    found = {}
    for name, what, rows in (("token", ("-p", "0", "-n", "32"), 1), ("8 rows", ("-p", "8", "-n", "0"), 8)):
        command = [o.llama_bench, "-m", file, "-t", str(o.threads), "-r", str(o.repeat), "-o", "json", *what]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = 1e3 * rows / json.loads(done.stdout)[0]["avg_ts"]
        except (OSError, subprocess.CalledProcessError, ValueError, LookupError) as e:
            last = (getattr(e, "stderr", None) or str(e)).strip().splitlines()[-1]
            raise InputError(f"--llama-bench {o.llama_bench}: {last}") from None
    return found


def action(o) -> None:
    """Measure every model, batch, tree and context. Print the table."""
    if o.llama_bench and not o.shape:
        raise InputError("--llama-bench: runs random weights; give --shape")
    where = {"device": o.device, "kv": o.kv, "isa": o.isa, "autotune": o.autotune}
    where |= {"compile": o.compile, "kernels": o.kernels}
    trees = [read_tree(spec) for spec in o.tree]
    rows, record, roof = [], bench.describe(o) | {"kv": o.kv, "model": o.checkpoint or o.shape}, 0.0
    for source in o.checkpoint or o.modes:
        if o.checkpoint:
            mode = read_config(source, "target").get("quantization", {}).get("mode", "none")
            model = ours.load(source, **where)
        else:
            mode, model = source, ours.load(None, o.shape, None if source == "none" else source, **where)
        for batch in o.batch:
            for row in measure(model, trees, batch, o):
                roof = roof or bench.bandwidth(model.device)
                row["roof"] = row["gigabytes"] * 1e12 / row["step"] / roof
                rows.append({"mode": mode, **row})
                bench.write(o.name, record | {"gigabytes_per_second": roof / 1e9, "rows": rows})
                at = f"tree {row['tree']}, batch {batch}, context {row['context']}"
                launched = f", {row['kernels']:.0f} kernels" if "kernels" in row else ""
                log_stderr(f"  {mode}, {at}: {row['step']:.2f} ms, verify {row['verify']:.2f}{launched}")
            gc.collect()  # compiled parts and their owner refer to each other
        del model
    if not rows:
        raise InputError("nothing could be measured, see above")
    print(f"memory: {roof / 1e9:.0f} GB/s")
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column != "top"]
    print(bench.table(record, columns, [[row.get(column) for column in columns] for row in rows]))
    for row in rows if o.top else ():
        for name, count, milliseconds in row.get("top", ())[: o.top]:
            print(f"{row['tree']}: {milliseconds:.3f} ms in {count:.0f} of {name[:80]}")
    if o.llama_bench:
        with tempfile.TemporaryDirectory() as folder:
            write_gguf(o.shape, Path(folder) / "shape.gguf")
            record["llama.cpp"] = llama_bench(o, Path(folder) / "shape.gguf")
        print("llama.cpp:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in record["llama.cpp"].items()))
        bench.write(o.name, record | {"gigabytes_per_second": roof / 1e9, "rows": rows})


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "step")
    add = p.add_argument
    bench.add_model(p, nargs="+")
    add("--modes", nargs="+", default=["none"], choices=("none", *MODES, MXFP4),
        help="precisions of a shape")
    add("--tree", nargs="+", default=["1,0,0", "8,2,4", "12,3,4", "60,7,10"], metavar="T,D,K")
    add("--context", nargs="+", type=positive, default=[128, 1024, 4096], metavar="N")
    add("--batch", nargs="+", type=positive, default=[1], metavar="B")
    add("--repeat", type=positive, default=15)
    add("--top", type=int, default=0, metavar="N", help="on a GPU: profile, print the N longest kernels")
    add("--llama-bench", metavar="FILE", help="llama.cpp's program; for a shape")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--kv", choices=("auto", "int8", "fp8"), default="auto", help="keys and values, see generate.py")
    add("--isa", help="of the CPU kernels (default: the best)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--kernels", action=argparse.BooleanOptionalAction, default=True)
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="check a GPU's kernels first")
    add("--autotune", action="store_true", help="torch.compile times several kernels for every product")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
