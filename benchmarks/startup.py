"""Time from process start to the first token on stdout, and where it goes: cold (empty compile cache) and
warm.

    python benchmarks/startup.py --checkpoint checkpoints/smollm2-135m

Each run is a fresh process of generate.py. `import` is what the process spends before loading the checkpoint.
Raw figures go to benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from bench import ROOT, describe, write

PARTS = {
    "kernels": r"^compiling the kernels took ([\d.]+) s", "load": r"^loaded .* in ([\d.]+) s",
    "compile prefill": r"^compiling the prefill.* took ([\d.]+) s",
    "compile step": r"^compiling the step.* took ([\d.]+) s",
}


def start(o, speculate: str, cache: str, *extra: str) -> dict[str, float]:
    """One process: seconds to the first byte of text, and the parts it reported."""
    command = [
        sys.executable, str(ROOT / "generate.py"), "--checkpoint", o.checkpoint, "--speculate", speculate
    ]
    command += ["--prompt", o.prompt, "--max-new-tokens", "8", "--threads", str(o.threads), *extra]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        )
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.communicate()
        errors.seek(0)
        lines = errors.read()
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{lines}")
    found = {"first token": first}
    for name, pattern in PARTS.items():
        if match := re.search(pattern, lines, re.MULTILINE):
            found[name] = float(match[1])
    found["load"] -= found.get("kernels", 0.0)  # compiled while loading
    ready = float(re.search(r"^ready ([\d.]+) s", lines, re.MULTILINE)[1])
    found["import"] = ready - sum(found.get(name, 0.0) for name in PARTS)
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--prompt", default="Explain in a few sentences why the sky is blue.")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeat", type=int, default=3, help="warm runs of each kind")
    p.add_argument("--name", default="startup", help="of the file under benchmarks/results")
    o = p.parse_args()
    record = describe(o.threads)
    for speculate in ("none", "eagle3"):
        with tempfile.TemporaryDirectory() as cache:
            runs = {"cold": [start(o, speculate, cache)]}
            runs["warm"] = [start(o, speculate, cache) for _ in range(o.repeat)]
            runs["--no-compile"] = [start(o, speculate, cache, "--no-compile") for _ in range(o.repeat)]
        for kind, found in runs.items():
            middle = {part: statistics.median(run[part] for run in found) for part in found[0]}
            print(
                f"{speculate:7s} {kind:13s} " + "  ".join(
                    f"{part} {seconds:.1f} s" for part, seconds in middle.items()
                ), flush=True
            )
        record[speculate] = runs
    write(o.name, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
