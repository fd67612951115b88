"""Our kernels compared with their definitions, on this device and at a model's sizes.

`failures` starts child processes that call `main`: after an illegal address a process cannot use the GPU. The
result is kept beside the compiled graphs. A backend without the
kernels that failed computes by their definitions.
"""
from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import first_line
from common.files import atomic_path
from kernels.backend import TORCH, TorchBackend
from kernels.build import COMPILED, ROOT, code_digest, writable
from kernels.gpu import products
from kernels.gpu.backend import CudaBackend
from kernels.gpu.cases import Case, Sizes

DRIVER = Path("/proc/driver/nvidia/version")
SECONDS = 600  # of a process, compilation included; what takes longer hangs
GUARD, EDGE, UNSET = 256, 0xA5, 0xFF  # bytes beside a tensor, their value, and that of what is not written


# -- the child -------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded() -> Iterator[list[Tensor]]:
    """Allocate tensors between guard bytes within this context, with bytes that are no number in them.

    Gives their memory: the tensors with the bytes beside them.
    """
    memories: list[Tensor] = []

    def guarding(allocate: Callable) -> Callable[..., Tensor]:
        def allocated(*arguments, **options) -> Tensor:
            x = allocate(*arguments, **options)
            memory = torch.full((2 * GUARD + x.nbytes,), EDGE, dtype=torch.uint8, device=x.device)
            memory[GUARD:-GUARD] = UNSET
            memories.append(memory)
            return memory[GUARD:-GUARD].view(x.dtype).view(x.shape)

        return allocated

    empty, new_empty = guarding(torch.empty), guarding(torch.Tensor.new_empty)
    with patch.object(torch, "empty", empty), patch.object(torch.Tensor, "new_empty", new_empty):
        yield memories


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
    """Raise AssertionError if a backend does not compute a case as its definition does, each time."""
    with guarded() if case.guards else contextlib.nullcontext([]) as memories:
        found = case.run(backend)
    if not all((memory[:GUARD] == EDGE).all() & (memory[-GUARD:] == EDGE).all() for memory in memories):
        raise AssertionError("writes outside its results")
    if wrong := difference(found, case.run(TORCH), case.limit):
        raise AssertionError(wrong)
    leaves, same = tree_leaves(found), []
    for _ in range(case.repeats):  # without a wait between them
        same += [(a == b).all() for a, b in zip(tree_leaves(case.run(backend)), leaves)]
    if not all(same):
        raise AssertionError("repeated, it gives other numbers")


@torch.no_grad()
def errors(
    sizes: Sizes, parts: dict[str, Callable], names: Sequence[str], failed: dict[str, str]
) -> Iterator[str]:
    """Check parts by name, each on a backend without those that have failed. Yield its error, or "".

    Ends the process, with the error as its last line, if the device cannot go on.
    """
    for name in names:
        backend, what, error = CudaBackend().without(failed), "", ""
        try:
            for case in parts[name](sizes):
                what = f"{case.what}: "
                print(what, file=sys.stderr, flush=True)  # the last line of a process that dies
                check(case, backend)
        except Exception as e:  # whatever a compiler or a device raises
            error = what + first_line(e)
            failed = failed | {name: error}
            if sizes.device != "cpu":
                try:
                    torch.cuda.synchronize()
                except Exception:  # an illegal address: every later call fails
                    raise SystemExit(error) from None
        yield error


def main(parts: dict[str, Callable]) -> None:
    """Check the parts that the command line names, and print a text in JSON at the start and for each.

    Standard input: sizes and what has failed, as Python writes them.
    """
    sizes, failed = ast.literal_eval(sys.stdin.read())
    sizes = Sizes(*sizes)
    if sizes.device != "cpu":
        torch.cuda.set_device(torch.device(sizes.device))
    products.choice = 0  # others use the GPU: times would be wrong, and kept for the process that asks
    for text in chain(["started"], errors(sizes, parts, sys.argv[1:], failed)):
        print(json.dumps(text), flush=True)


# -- the parent ------------------------------------------------------------------------------------


def places_of(sizes: Sizes) -> list[Path]:
    """Return the files that the result for these sizes, this device and what compiled the kernels may be in.

    The last one is written.
    """
    device = torch.device(sizes.device)
    depends = [
        sizes, torch.__version__, triton.__version__, torch.version.cuda,
        DRIVER.read_text() if DRIVER.exists() else None,
        torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        code_digest(), os.environ.get("TORCHINDUCTOR_ENABLE_PDL"),  # see `kernels.gpu.launch`
    ]
    name = f"kernels-{hashlib.sha256(repr(depends).encode()).hexdigest()[:24]}.json"
    return [folder / "graphs" / name for folder in (COMPILED, writable(COMPILED))]


def failures(
    sizes: Sizes, say: Callable[[str], None], groups: Sequence[Sequence[str]], command: tuple[str, ...]
) -> dict[str, str]:
    """Return the parts that fail at these sizes, with a line about each: of the file, or of a new check.

    say: gets these lines. groups: names of parts, each group checked by a process of its own. The last group
    is built on the others, and checked once more without those of their parts that fail. command: what runs
    the check. The result is kept unless a check cannot run.
    """
    found, places = None, places_of(sizes)
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            found = found or json.loads(place.read_text())
    if found is None:
        say("comparing our kernels with their definitions, once on this GPU ...")
        run = partial(_checked, sizes, command)
        with ThreadPoolExecutor(len(groups)) as pool:
            *kernels, steps = pool.map(partial(run, {}), groups)
        failed = {part: error for group in kernels for part, error in group.items()}
        found = failed | (run(failed, groups[-1]) if failed else steps)
        with contextlib.suppress(OSError):
            if not any("out of memory" in error or UNABLE in error for error in found.values()):
                places[-1].parent.mkdir(exist_ok=True)
                with atomic_path(places[-1]) as part:
                    part.write_text(json.dumps(found))
    lines = {part: f"the GPU path does without {part!r}, which is slower: {e}" for part, e in found.items()}
    for line in lines.values():
        say(line)
    return lines


UNABLE = "the check does not start"


def _checked(
    sizes: Sizes, command: tuple[str, ...], failed: dict[str, str], left: Sequence[str]
) -> dict[str, str]:
    """Return the errors of parts that fail, beside those that have failed.

    A part during which the process dies or hangs fails; another process checks the ones after it. If none
    starts, all fail.
    """
    found, path = {}, os.environ.get("PYTHONPATH")
    while left:
        try:
            done = subprocess.run(
                [*command, *left], input=repr((tuple(sizes), failed | found)), capture_output=True,
                text=True, cwd=ROOT, timeout=SECONDS,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path)))},
            )
            output, death = done.stdout, _death(done)
        except subprocess.TimeoutExpired as e:
            last = _last_line((e.stderr or b"").decode())
            output, death = (e.stdout or b"").decode(), f"{last} no end after {SECONDS} s"
        texts = [json.loads(line) for line in output.splitlines() if line.startswith('"')]
        if not texts:
            return found | dict.fromkeys(left, f"{UNABLE} ({death})")
        texts.append(death)  # the error of the part during which it ended, if there is one
        found |= {part: error for part, error in zip(left, texts[1:]) if error}
        left = left[len(texts) - 1 :]
    return found


def _death(done: subprocess.CompletedProcess) -> str:
    """Describe the end of a process: the last line that it printed, and its signal.

    Raises KeyboardInterrupt if it got that.
    """
    if done.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    last = _last_line(done.stderr)
    if done.returncode < 0:
        return f"{last} the process died of {signal.Signals(-done.returncode).name}"
    return f"the process ended: {last or done.returncode}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
