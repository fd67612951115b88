"""Time from process start to the first token by phase, cold (nothing compiled) and warm.

    python benchmarks/startup.py --checkpoint checkpoints/smollm2-135m

Each run is a new process of generate.py. `import` is the time before the checkpoint is loaded.
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


def start(o, checkpoint: str, speculate: str, cache: str, *more: str) -> dict[str, float]:
    """Return the seconds of a process to its first byte of output, and of each phase that it logged.

    cache: the folder for compiled code. Raise InputError if the process fails.
    """
    command = [
        sys.executable, str(ROOT / "generate.py"), "--checkpoint", checkpoint, "--speculate", speculate,
        "--prompt", o.prompt, "--max-new-tokens", "8", "--threads", str(o.threads), *more,
    ]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        process.stdout.read(1)
        first = time.perf_counter() - began
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
    parts["load"] -= parts.get("kernels", 0.0)  # compiled while loading
    ready = float(re.search(READY, log, re.MULTILINE)[1])
    return {**parts, "import": ready - sum(parts.values())}


def action(o) -> None:
    """Time starts without drafting and with EAGLE-3, cold and warm. Print medians."""
    record, rows = bench.describe(o), []
    for speculate in ("none", "eagle3"):
        with tempfile.TemporaryDirectory() as cache:
            runs = record[speculate] = {"cold": [start(o, o.checkpoint, speculate, cache)]}
            for kind, more in (("warm", ()), ("--no-compile", ("--no-compile",))):
                runs[kind] = [start(o, o.checkpoint, speculate, cache, *more) for _ in range(o.repeat)]
        for kind, starts in runs.items():
            medians = {part: statistics.median(one[part] for one in starts) for part in starts[0]}
            parts = (medians.get(part) for part in ("first token", "import", *PHASES))
            rows.append([f"{speculate}, {kind}", *parts])
    bench.write(o.name, record)
    print(bench.table(record, ["seconds", "first token", "import", *PHASES], rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "startup")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--prompt", default="Explain in a few sentences why the sky is blue.")
    p.add_argument("--repeat", type=positive, default=3, help="warm runs of each kind")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
