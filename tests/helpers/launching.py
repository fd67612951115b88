"""Run commands on several processes with torchrun, also as several machines."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command, timeout: float = 300) -> str:
    """Run a command in the repository, on one thread; return its stdout.

    On failure, show the command and its output.
    """
    command = [str(word) for word in command]
    env = {**ONE_THREAD, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    options = {"capture_output": True, "text": True, "timeout": timeout}
    result = subprocess.run(command, cwd=ROOT, env=env, **options)
    if result.returncode:
        output = result.stdout[-3000:] + result.stderr[-3000:]
        raise AssertionError(f"{' '.join(command)}\nended with {result.returncode}: {output}")
    return result.stdout


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Launch:
    """A command that runs on simulated machines: one torchrun per machine, all on localhost."""

    def __init__(self, command: list[str], machines: int, per_machine: int):
        port, address = str(free_port()), ["--master-addr", "127.0.0.1", "--master-port"]
        self.runs = [
            subprocess.Popen(
                [*TORCHRUN, "--nnodes", str(machines), "--nproc-per-node", str(per_machine),
                 "--node-rank", str(rank), *address, port, *command],
                cwd=ROOT, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(machines)
        ]

    def kill_one(self, when: Callable[[], bool]) -> None:
        """Kill one process with SIGKILL as soon as `when()` is true."""
        deadline = time.time() + 300
        while not when():
            assert all(run.poll() is None for run in self.runs) and time.time() < deadline, self.wait()
            time.sleep(0.01)
        parent = self.runs[-1].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)

    def wait(self) -> tuple[list[int], str]:
        """Wait for all processes; return (exit statuses, stderr)."""
        errors = [run.communicate(timeout=180)[1] for run in self.runs]
        return [run.returncode for run in self.runs], "\n".join(errors)
