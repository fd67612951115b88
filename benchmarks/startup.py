"""Time from process start to the first text, and where it goes: cold (nothing compiled yet) and warm.

    python benchmarks/startup.py --checkpoint checkpoints/smollm2-135m

Each run is a new process of generate.py. `import` is what the process spends before it loads the checkpoint.
Raw figures go to benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import bench  # first: it makes the modules below importable
from bench import ROOT, describe, write

from common.errors import InputError

# What generate.py says about its own times.
PARTS = {
    "kernels": r"^compiling the kernels took ([\d.]+) s", "load": r"^loaded .* in ([\d.]+) s",
    "compile prefill": r"^compiling the prefill.* took ([\d.]+) s",
    "compile step": r"^compiling the step.* took ([\d.]+) s",
}
READY = r"^ready ([\d.]+) s"


def link(source: str, copy: str) -> None:
    """Make a link in place of a copy."""
    os.symlink(os.path.abspath(source), copy)


def start(o, checkpoint: str, speculate: str, cache: str, *extra: str) -> dict[str, float]:
    """Run one process: seconds to its first byte of text, and the parts it reported.

    cache: the folder for compiled code. extra: more flags. Raises InputError if the process fails.
    """
    command = [
        sys.executable, str(ROOT / "generate.py"), "--checkpoint", checkpoint, "--speculate", speculate,
        "--prompt", o.prompt, "--max-new-tokens", "8", "--threads", str(o.threads), *extra,
    ]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as notes:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=notes, env=environment)
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.communicate()
        notes.seek(0)
        lines = notes.read()
    if process.returncode:
        last = (lines.strip() or "no message").splitlines()[-1]
        raise InputError(f"generate.py --speculate {' '.join((speculate, *extra))} failed ({last})")
    return {"first token": first, **parts_of(lines)}


def parts_of(notes: str) -> dict[str, float]:
    """The parts of the start in seconds, from what generate.py wrote to stderr."""
    matches = {name: re.search(pattern, notes, re.MULTILINE) for name, pattern in PARTS.items()}
    parts = {name: float(match[1]) for name, match in matches.items() if match}
    parts["load"] -= parts.get("kernels", 0.0)  # they are compiled while loading
    ready = float(re.search(READY, notes, re.MULTILINE)[1])
    return {**parts, "import": ready - sum(parts.values())}


def run(o) -> None:
    """Start plainly and with EAGLE-3, cold and warm; print medians, write all runs."""
    if not os.path.isdir(o.checkpoint):
        raise InputError(f"--checkpoint {o.checkpoint}: not a folder; give a converted one")
    record = describe(o.threads)
    for speculate in ("none", "eagle3"):
        with tempfile.TemporaryDirectory() as cache:
            # Without what earlier runs have measured on this machine, and left.
            left = shutil.ignore_patterns("costs.json")
            fresh = shutil.copytree(o.checkpoint, f"{cache}/checkpoint", ignore=left, copy_function=link)
            runs = {
                "cold": [start(o, fresh, speculate, cache)],
                "warm": [start(o, fresh, speculate, cache) for _ in range(o.repeat)],
                "--no-compile": [start(o, fresh, speculate, cache, "--no-compile") for _ in range(o.repeat)],
            }
        for kind, starts in runs.items():
            medians = {part: statistics.median(one[part] for one in starts) for part in starts[0]}
            shown = "  ".join(f"{part} {seconds:.1f} s" for part, seconds in medians.items())
            print(f"{speculate:7s} {kind:13s} {shown}", flush=True)
        record[speculate] = runs
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "startup")
    add = p.add_argument
    add("--checkpoint", required=True)
    add("--prompt", default="Explain in a few sentences why the sky is blue.")
    add("--repeat", type=int, default=3, help="warm runs of each kind")
    p.within("--repeat", 1, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
