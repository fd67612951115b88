"""Our kernels compared with their definitions, on this device and at a model's sizes.

`failures` runs a module that calls `main`: a process of its own, as an illegal address ends every later call
of the process that meets it. It keeps the result beside the compiled graphs. A backend without the kernels
that failed computes by their definitions.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import first_line
from common.files import atomic_path
from kernels.backend import TORCH, TorchBackend
from kernels.build import COMPILED, writable
from kernels.gpu.backend import CudaBackend
from kernels.gpu.cases import Case, Sizes

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # of all parts, compilation included; what takes longer hangs
GUARD, EDGE, UNSET = 256, 0xA5, 0xFF  # bytes beside a tensor, their value, and that of what is not written
RECENT = 32  # allocations, more than a kernel has results and scratch


# -- the child -------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded() -> Iterator[Callable[[], bool]]:
    """Allocate tensors between guard bytes within this context, with bytes that are no number in them.

    Gives a function that returns whether all guard bytes are unchanged.
    """
    recent: deque[Tensor] = deque()
    intact = []

    def look(memory: Tensor) -> None:
        whole = (memory[:GUARD] == EDGE).all() & (memory[-GUARD:] == EDGE).all()
        intact[:] = [whole & other for other in intact] or [whole]

    def guarding(allocate: Callable) -> Callable[..., Tensor]:
        def allocated(*arguments, **options) -> Tensor:
            x = allocate(*arguments, **options)
            memory = torch.full((2 * GUARD + x.nbytes,), EDGE, dtype=torch.uint8, device=x.device)
            memory[GUARD : GUARD + x.nbytes] = UNSET
            recent.append(memory)
            if len(recent) > RECENT:  # its kernel has been launched
                look(recent.popleft())
            return memory[GUARD : GUARD + x.nbytes].view(x.dtype).view(x.shape)

        return allocated

    def all_intact() -> bool:
        while recent:
            look(recent.popleft())
        return all(intact)

    empty, new_empty = guarding(torch.empty), guarding(torch.Tensor.new_empty)
    with patch.object(torch, "empty", empty), patch.object(torch.Tensor, "new_empty", new_empty):
        yield all_intact


def difference(found, wanted, limit: float) -> str | None:
    """Describe how results differ: whole numbers at all, others by more than `limit`; None: they do not."""
    for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        if a.dtype.is_floating_point:
            near = torch.isclose(a.double(), b.double(), limit, limit, equal_nan=False)
        else:
            near = a == b
        if not near.all():
            most = (a.double() - b.double())[~near].abs().max().item()
            return f"{int((~near).sum())} of {near.numel()} numbers differ, by up to {most:.3g}"
    return None


def check(case: Case, backend: TorchBackend) -> None:
    """Raise AssertionError if a backend does not compute a case as its definition does."""
    with guarded() if case.guards else contextlib.nullcontext(lambda: True) as intact:
        found = case.run(backend)
        if not intact():
            raise AssertionError("writes outside its results")
    wrong = difference(found, case.run(TORCH), case.limit)
    if wrong:
        raise AssertionError(wrong)


@torch.no_grad()
def run(
    sizes: Sizes, failed: dict[str, str], names: Collection[str], parts: dict[str, Callable],
    say: Callable[[str], None],
) -> None:
    """Check parts by name, each on a backend without those that have failed.

    say: gets a line of JSON when a part begins, and one with the error if it fails. Raises an error if the
    device cannot go on.
    """
    for name in names:
        say(json.dumps({"part": name}))
        backend, what = CudaBackend().without(failed), ""
        try:
            for case in parts[name](sizes):
                what = f"{case.what}: "
                check(case, backend)
        except Exception as e:  # whatever a compiler or a device raises
            failed = failed | {name: what + first_line(e)}
            say(json.dumps({"part": name, "error": failed[name]}))
            if sizes.device != "cpu":
                torch.cuda.synchronize()
    say(json.dumps({"ended": True}))


def main(parts: dict[str, Callable]) -> None:
    """Check the parts that the command line names. Standard input: sizes and what has failed, as JSON."""
    sizes, failed = json.load(sys.stdin)
    sizes = Sizes(**sizes)
    if sizes.device != "cpu":
        torch.cuda.set_device(torch.device(sizes.device))
    run(sizes, failed, sys.argv[1:], parts, lambda line: print(line, flush=True))


# -- the parent ------------------------------------------------------------------------------------


def place_of(sizes: Sizes) -> Path:
    """Return the file of the result for these sizes, this device and what compiled the kernels."""
    driver, device = Path("/proc/driver/nvidia/version"), torch.device(sizes.device)
    depends = [
        sizes, torch.__version__, triton.__version__, torch.version.cuda,
        driver.read_text() if driver.exists() else None,
        torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        [(p.name, p.read_text()) for p in sorted(Path(__file__).parent.glob("*.py"))],
    ]
    return COMPILED / "graphs" / f"kernels-{hashlib.sha256(repr(depends).encode()).hexdigest()[:24]}.json"


def failures(
    sizes: Sizes, say: Callable[[str], None], parts: Collection[str], command: tuple[str, ...]
) -> dict[str, str]:
    """Return the parts that fail at these sizes, with a line about each: of the file, or of a new check.

    say: gets these lines. command: what runs the check. A part during which the process dies or hangs has
    failed, and the others are checked by another process. If it cannot run at all, all parts have failed,
    and the result is not kept.
    """
    place = place_of(sizes)
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError):
        say("comparing our kernels with their definitions, once on this GPU ...")
        found, whole = _checked(sizes, list(parts), command)
        with contextlib.suppress(OSError):
            if whole:
                with atomic_path(writable(place.parent) / place.name) as part:
                    part.write_text(json.dumps(found))
    for line in found.values():
        say(line)
    return found


def _checked(sizes: Sizes, left: list[str], command: tuple[str, ...]) -> tuple[dict[str, str], bool]:
    """Return the lines about parts that fail, and whether each has been checked."""
    found: dict[str, str] = {}
    while left:
        began, ended, died = None, False, None
        try:
            done = subprocess.run(
                [*command, *left], input=json.dumps((sizes._asdict(), found)), capture_output=True,
                text=True, cwd=ROOT, timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            lines, died = done.stdout, _death(done)
        except subprocess.TimeoutExpired as e:
            lines, died = (e.stdout or b"").decode(), f"no end after {SECONDS} s"
        for record in (json.loads(line) for line in lines.splitlines() if line.startswith("{")):
            ended, began = "ended" in record, record.get("part", began)
            if "error" in record:
                found[began] = record["error"]
        if ended:
            break
        if began is None:
            return {part: _line(part, f"the check does not start ({died})") for part in left}, False
        found.setdefault(began, died)
        left = left[left.index(began) + 1 :]
    whole = not any("out of memory" in error for error in found.values())
    return {part: _line(part, error) for part, error in found.items()}, whole


def _death(done: subprocess.CompletedProcess) -> str:
    """Describe the end of a process: its signal, or the last line that it printed."""
    if done.returncode < 0:
        return f"the process died of {signal.Signals(-done.returncode).name}"
    return f"the process ended: {(done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}"


def _line(part: str, error: str) -> str:
    return f"the GPU path does without {part!r}, which is slower: {error}"
