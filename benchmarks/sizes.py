"""4 bits at the sizes that people run, beside llama.cpp's Q4_0, with random weights of a published shape.

    python benchmarks/sizes.py --shape llama-3.2-1b --folder DIR --write
    python benchmarks/sizes.py --shape llama-3.2-1b --folder DIR --mode w4a8 --llama-bench FILE --peak

--write puts the weights into DIR once: SHAPE-int4 in our format and the same weights, exactly, in SHAPE.gguf.
The modes int4 and w4a8 read the same files. Then, in turns:

plain      ours, one token after the other; llama.cpp the same (llama-bench -n)
8 rows     the target's pass over the 8 rows of a chain of 7 drafted tokens, and the whole step with an
           EAGLE-3 head of the shape's published size, its weights random too; llama-bench -p 8, which scores
           the last row only
peak       memory of a generate.py that decodes --tokens tokens plainly, over the weights and caches

What a drafted text would reach is computed, not measured: a published acceptance length over the step's time.
Figures are medians; raw ones go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import ROOT, describe, write
from gguf_copy import write_gguf
from shapes import random_head, shape_of, write_random
from step import HeldStep, measure

from checkpoint.loading import load_model
from checkpoint.names import CONFIG, WEIGHTS
from common.cli import note
from common.errors import InputError
from common.files import atomic_path
from kernels.choose import choose_backend
from kernels.modes import BESIDE
from model import Transformer
from tree import TreeShape

CHAIN = TreeShape(8, 6, 1)  # the root and 7 drafted tokens
# Acceptance lengths of EAGLE-3 heads in chains of 7, Qwen3-4B, greedy (arXiv 2607.05147, table 1).
PUBLISHED = {"GSM8K": 5.14, "MATH": 4.62, "HumanEval": 4.16, "MT-Bench": 2.39, "Alpaca": 2.26}


def files(o) -> tuple[Path, Path]:
    """Our folder and llama.cpp's file of the shape."""
    return Path(o.folder) / f"{o.shape}-int4", Path(o.folder) / f"{o.shape}.gguf"


def write_both(o) -> None:
    """Write the same random weights twice, but for what is there already."""
    ours, theirs = files(o)
    if not ours.exists():
        write_random(o.shape, "int4", ours)
    if not theirs.exists():
        with atomic_path(theirs) as part:
            write_gguf(None, load_model(ours)[0], part, "Q4_0")
    note(f"{ours}: {(ours / WEIGHTS).stat().st_size:,} bytes; {theirs}: {theirs.stat().st_size:,} bytes")


def in_mode(folder: Path, mode: str, into: Path) -> Path:
    """A folder with the weights of an int4 one that says that they are of this mode."""
    config = json.loads((folder / CONFIG).read_text())
    config["quantization"] |= {"mode": mode, "lm_head": BESIDE[mode]}
    (into / CONFIG).write_text(json.dumps(config))
    (into / WEIGHTS).symlink_to((folder / WEIGHTS).resolve())
    return into


def llama_bench(o, *what: str) -> float:
    """Tokens per second. Raises InputError if the program fails."""
    command = [o.llama_bench, "-m", files(o)[1], "-t", str(o.threads), "-r", "1", "-o", "json", *what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)[0]["avg_ts"]
    except (OSError, subprocess.CalledProcessError, ValueError, LookupError) as e:
        last = (getattr(e, "stderr", None) or str(e)).strip().splitlines()[-1]
        raise InputError(f"--llama-bench {o.llama_bench}: {last}") from None


def peak_bytes(folder: Path, o) -> int:
    """The most memory that generate.py takes to load a folder and decode."""
    command = [
        sys.executable, ROOT / "generate.py", "--checkpoint", folder, "--prompt-ids", "1,2,3", "--threads",
        str(o.threads), "--max-new-tokens", str(o.tokens), "--max-seq-len", "2048",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise InputError(f"generate.py: {errors.strip().splitlines()[-1]}")
    return usage.ru_maxrss * 1024


def weights_and_caches(folder: Path, target: Transformer) -> int:
    """Bytes of a folder's weights, and of the keys and values of 2,048 tokens."""
    return (folder / WEIGHTS).stat().st_size + target.cache_bytes(1, 2048)


@torch.no_grad()
def run(o) -> None:
    """Write, or measure, print, write. Raises InputError."""
    shape_of(o.shape)
    if o.write:
        write_both(o)
        return
    backend = choose_backend("cpu", say=note)
    isa = backend.name
    with tempfile.TemporaryDirectory() as into:
        folder = in_mode(files(o)[0], o.mode, Path(into))
        target, _ = load_model(folder)
        size = weights_and_caches(folder, target)
        peak = peak_bytes(folder, o) if o.peak else None
    head = random_head(o.shape, target, BESIDE[o.mode])
    backend.prepare(target, head)
    steps = [HeldStep(target, head, shape, 1, o.context, True) for shape in (TreeShape(1, 0, 0), CHAIN)]
    ours: list[list[dict]] = []
    theirs: dict[str, list[float]] = {"plain": [], "8 rows": []}
    for turn in range(o.turns):
        ours.append(measure(steps, o.context, o.repeat, 1.0))
        if o.llama_bench:
            theirs["plain"].append(llama_bench(o, "-p", "0", "-n", str(o.tokens)))
            theirs["8 rows"].append(llama_bench(o, "-p", "8", "-n", "0"))
        note(f"  {turn + 1}/{o.turns}")

    def median(which: int, part: str) -> float:
        return statistics.median(rows[which][part] for rows in ours)

    plain, verify, step = median(0, "step"), median(1, "verify"), median(1, "step")
    record = describe(o.threads) | {
        "shape": o.shape, "mode": o.mode, "context": o.context, "bytes": size, "peak": peak,
        "plain": 1e3 / plain, "pass_of_1": median(0, "verify"), "pass_of_8": verify,
        "ratio_of_8": verify / median(0, "verify"), "draft": median(1, "draft"), "step_of_8": step,
        "gigabytes_per_second": median(0, "gigabytes") / plain * 1e3,
        "llama": {name: statistics.median(t) for name, t in theirs.items() if t},
        "computed": {name: 1e3 * tau / step for name, tau in PUBLISHED.items()}, "turns": ours,
        "llama_turns": theirs,
    }
    print(f"{o.shape} {o.mode} {isa}: plain {record['plain']:.1f} tokens/s", end="")
    if o.llama_bench:
        ratios = (1e3 / rows[0]["step"] / speed for rows, speed in zip(ours, theirs["plain"]))
        record["of_llama"] = statistics.median(ratios)
        print(f", {record['of_llama']:.2f} x llama.cpp's {record['llama']['plain']:.1f}", end="")
    print(f"; 8 rows {verify:.1f} ms, {record['ratio_of_8']:.2f} passes; drafting {record['draft']:.1f} ms")
    if peak:
        print(f"peak {peak / 1e6:,.0f} MB, {peak / size:.2f} x weights and caches")
    computed = ", ".join(f"{name} {speed:.1f}" for name, speed in record["computed"].items())
    print(f"computed: {computed} tokens/s")
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "sizes")
    add = p.add_argument
    add("--shape", required=True, help="see benchmarks/shapes.py")
    add("--folder", required=True, metavar="DIR", help="where the weights are")
    add("--write", action="store_true", help="write them, and measure nothing")
    add("--mode", choices=BESIDE, default="int4", help="how our kernels read them")
    add("--llama-bench", metavar="FILE", help="llama.cpp's program")
    add("--peak", action="store_true", help="measure memory too")
    add("--tokens", type=int, default=32, help="of a llama-bench run, and of generate.py")
    add("--context", type=int, default=64, metavar="N", help="tokens before ours")
    add("--turns", type=int, default=5)
    add("--repeat", type=int, default=7, help="steps in a turn")
    p.refuse(
        lambda o: min(o.tokens, o.context, o.turns, o.repeat) < 1,
        lambda o: "--tokens, --context, --turns and --repeat must be at least 1",
    )
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
