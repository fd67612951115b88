"""The Triton kernels under compute-sanitizer: accesses outside of memory, races in shared memory.

    python benchmarks/sanitize.py

Runs the kernels' tests whose names fit --tests (pytest's -k). They should be few and small, as a kernel is
many times slower so. Where compute-sanitizer is not installed or does not take the device, one line says so.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys

import bench  # first: it makes the modules below importable

from common.cli import note
from common.errors import InputError

PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
NO_DEVICE = "Device not supported"
# Kernels whose programs meet in scratch memory, and those of the tree.
SMALL = "counters or test_move or share_tiles or (gpu and (emit or accept_of or other_names))"
FOUND = 99  # exit status of compute-sanitizer when it has found something
NO_TESTS = 5  # and of pytest when no name fits


def sanitize(tool: str, check: str, tests: str) -> None:
    """Run the tests under one check. Raises InputError if something is found, or they fail."""
    command = [tool, "--tool", check, "--error-exitcode", str(FOUND)]
    command += ["--target-processes", "application-only", sys.executable, "-m", "pytest"]
    command += ["-o", "addopts=", "--import-mode=importlib", "-q", "-x"]
    command += ["-p", "no:cacheprovider", "-k", tests, "tests/kernels/gpu", "tests/kernels/test_parts.py"]
    # Each tensor is an allocation of its own: what lies beyond it is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=bench.ROOT, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if NO_DEVICE in output:
        note(f"{check}: left out, compute-sanitizer does not take this device")
        return
    if done.returncode == NO_TESTS:
        raise InputError(f"no test of the GPU kernels fits {tests!r}")
    print(output[-6000:])
    if done.returncode:
        raise InputError(f"{check}: {'it found errors' if done.returncode == FOUND else 'the tests failed'}")
    note(f"{check}: nothing found")


def run(o) -> None:
    """All checks, whatever the ones before have found. Raises InputError if one has found something."""
    tool = shutil.which("compute-sanitizer", path=PLACES)
    if not tool:
        note("compute-sanitizer is not installed: left out")
        return
    errors = []
    for check in o.checks:
        try:
            sanitize(tool, check, o.tests)
        except InputError as e:
            errors.append(str(e))
    if errors:
        raise InputError("; ".join(errors))


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "sanitize")
    p.add_argument("--checks", nargs="+", default=["memcheck", "racecheck"], metavar="TOOL")
    p.add_argument("--tests", default=SMALL, metavar="WORDS", help=f"pytest's -k (default: {SMALL})")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
