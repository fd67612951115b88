"""What every benchmark here shares: where it runs, and where its raw figures go."""
from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))


def device_name() -> str:
    """The GPU, or the CPU's model name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe(threads: int) -> dict:
    """Date, device, threads and torch version, the head of every result file."""
    return {
        "date": datetime.date.today().isoformat(), "device": device_name(), "threads": threads,
        "torch": torch.__version__
    }


def write(name: str, record: dict) -> None:
    """Write benchmarks/results/NAME.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
