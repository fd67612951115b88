"""Time from process start to the first token by phase, cold (nothing compiled) and warm.

    python benchmarks/startup.py --checkpoint checkpoints/smollm2-135m

Each run is a new process of generate.py. `other`: time until ready that is in no phase, such as imports.
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

# Times that generate.py logs.
PHASES = {
    "kernels": r"^compiling the kernels took ([\d.]+) s", "load": r"^loaded .* in ([\d.]+) s",
    "compile prefill": r"^compiling the prefill.* took ([\d.]+) s",
    "compile step": r"^compiling the step.* took ([\d.]+) s",
    "compile commit": r"^compiling the commit.* took ([\d.]+) s",
}
READY = r"^ready after ([\d.]+) s"


def time_start(args, checkpoint: str, speculate: str, cache: str, *more: str) -> dict[str, float]:
    """Return the seconds from process start to the first byte of output, and of each logged phase.

    cache: folder for compiled code. Raise InputError if the process fails.
    """
    command = [
        sys.executable, str(ROOT / "generate.py"), "--checkpoint", checkpoint, "--speculate", speculate,
        "--prompt", args.prompt, "--max-new-tokens", "8", "--threads", str(args.threads), *more,
    ]
    start_time = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        process.stdout.read(1)
        first = time.perf_counter() - start_time
        process.communicate()
        log.seek(0)
        lines = log.read()
    if process.returncode:
        last = (lines.strip() or "no message").splitlines()[-1]
        raise InputError(f"generate.py --speculate {' '.join((speculate, *more))} failed ({last})")
    return {"first token": first, **parse_phases(lines)}


def parse_phases(log: str) -> dict[str, float]:
    """Parse the seconds of each phase from the log of generate.py."""
    matches = {name: re.search(pattern, log, re.MULTILINE) for name, pattern in PHASES.items()}
    parts = {name: float(match[1]) for name, match in matches.items() if match}
    parts["load"] -= parts.get("kernels", 0.0)  # kernels are compiled while loading
    ready = float(re.search(READY, log, re.MULTILINE)[1])
    return {**parts, "other": ready - sum(parts.values())}


def action(args) -> None:
    """Measure startup without drafting and with EAGLE-3, cold and warm. Print medians."""
    record, rows = bench.describe(args), []
    for speculate in ("none", "eagle3"):
        with tempfile.TemporaryDirectory() as cache:
            runs = record[speculate] = {"cold": [time_start(args, args.checkpoint, speculate, cache)]}
            for variant, more in (("warm", ()), ("--no-compile", ("--no-compile",))):
                runs[variant] = [time_start(args, args.checkpoint, speculate, cache, *more)
                                 for _ in range(args.repeat)]
        for variant, starts in runs.items():
            medians = {part: statistics.median(run[part] for run in starts) for part in starts[0]}
            parts = (medians.get(part) for part in ("first token", "other", *PHASES))
            rows.append([f"{speculate}, {variant}", *parts])
    bench.write(args.name, record)
    print(bench.table(record, ["seconds", "first token", "other", *PHASES], rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "startup")
    p.add_argument("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    p.add_argument("--prompt", default="Explain in a few sentences why the sky is blue.", help="prompt")
    p.add_argument("--repeat", type=positive, default=3, help="warm runs of each variant (default 3)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
