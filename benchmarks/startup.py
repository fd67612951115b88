"""Time from process start to the first text, and where it goes: cold (nothing compiled yet) and warm.

    python benchmarks/startup.py --checkpoint checkpoints/smollm2-135m

Each run is a new process of generate.py. `import` is what the process spends before it loads the checkpoint.
Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import bench  # first: it makes the modules below importable
from bench import ROOT, positive

from common.errors import InputError

# The times that generate.py prints.
PARTS = {
    "kernels": r"^compiling the kernels took ([\d.]+) s", "load": r"^loaded .* in ([\d.]+) s",
    "compile prefill": r"^compiling the prefill.* took ([\d.]+) s",
    "compile step": r"^compiling the step.* took ([\d.]+) s",
    "compile commit": r"^compiling the commit.* took ([\d.]+) s",
}
READY = r"^ready ([\d.]+) s"


def start(o, checkpoint: str, speculate: str, cache: str, *more: str) -> dict[str, float]:
    """Return the seconds of a process to its first byte of text, and the parts that it printed.

    cache: the folder for compiled code. Raise InputError if the process fails.
    """
    command = [
        sys.executable, str(ROOT / "generate.py"), "--checkpoint", checkpoint, "--speculate", speculate,
        "--prompt", o.prompt, "--max-new-tokens", "8", "--threads", str(o.threads), *more,
    ]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as notes:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=notes, env=environment)
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.communicate()
        notes.seek(0)
        lines = notes.read()
    if process.returncode:
        last = (lines.strip() or "no message").splitlines()[-1]
        raise InputError(f"generate.py --speculate {' '.join((speculate, *more))} failed ({last})")
    return {"first token": first, **parts_of(lines)}


def parts_of(notes: str) -> dict[str, float]:
    """Return the seconds of each part of a start, from generate.py's notes."""
    matches = {name: re.search(pattern, notes, re.MULTILINE) for name, pattern in PARTS.items()}
    parts = {name: float(match[1]) for name, match in matches.items() if match}
    parts["load"] -= parts.get("kernels", 0.0)  # they are compiled while loading
    ready = float(re.search(READY, notes, re.MULTILINE)[1])
    return {**parts, "import": ready - sum(parts.values())}


def action(o) -> None:
    """Start plainly and with EAGLE-3, cold and warm. Print medians."""
    record, rows = bench.describe(o), []
    for speculate in ("none", "eagle3"):
        with tempfile.TemporaryDirectory() as cache:
            runs = record[speculate] = {"cold": [start(o, o.checkpoint, speculate, cache)]}
            for kind, more in (("warm", ()), ("--no-compile", ("--no-compile",))):
                runs[kind] = [start(o, o.checkpoint, speculate, cache, *more) for _ in range(o.repeat)]
        for kind, starts in runs.items():
            medians = {part: statistics.median(one[part] for one in starts) for part in starts[0]}
            parts = (medians.get(part) for part in ("first token", "import", *PARTS))
            rows.append([f"{speculate}, {kind}", *parts])
    bench.write(o.name, record)
    print(bench.table(record, ["seconds", "first token", "import", *PARTS], rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "startup")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--prompt", default="Explain in a few sentences why the sky is blue.")
    p.add_argument("--repeat", type=positive, default=3, help="warm runs of each kind")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
