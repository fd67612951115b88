"""What the benchmarks share: their frame, timing in turns, and where raw figures go."""
from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 16  # tokens that a contender decodes before it is timed
RESULTS = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
sys.path.insert(0, str(ROOT))  # the project, for this file and for those that import it

from common.cli import MOST_THREADS, Options, note, run_command  # noqa: E402
from common.errors import InputError  # noqa: E402
from common.threads import use_threads  # noqa: E402
from engine.capture import capture  # noqa: E402
from engine.runtime import check_device, use_device  # noqa: E402
from engine.text_decoder import TextDecoder  # noqa: E402
from evaluation.sets import rotated  # noqa: E402
from kernels.cpu import isa_in_use  # noqa: E402
from kernels.isa import processor_name  # noqa: E402


def options(description: str, name: str, threads: int = 2) -> Options:
    """A parser with what every benchmark takes. name, threads: the defaults of --name and --threads."""
    p = Options(description)
    p.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default {threads})")
    p.within("--threads", 1, MOST_THREADS)
    p.add_argument(
        "--name", default=name, help=f"of the files under benchmarks/results, or $OUT (default {name})"
    )
    return p


def add_model(p: Options, what: str = "converted target with its EAGLE-3 head") -> None:
    """Add --checkpoint and --shape, one of which must be given."""
    p.add_argument("--checkpoint", help=what)
    p.add_argument("--shape", help="instead: a published shape with random weights, see benchmarks/shapes.py")
    p.refuse(
        lambda o: bool(o.checkpoint) == bool(o.shape), lambda o: "give --checkpoint DIR or --shape NAME"
    )


def run(p: Options, action: Callable, argv: list[str] | None) -> int:
    """Run action(options) on so many threads. Returns the exit status, see `common.cli.run_command`."""
    o = p.parse_args(argv)

    def checked() -> None:
        p.check(o)
        use_threads(o.threads, note)
        o.threads = torch.get_num_threads()
        action(o)

    return run_command(checked, OSError, ValueError)


def device_name() -> str:
    """The GPU, or the CPU's model name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()


def describe(threads: int) -> dict:
    """Date, device, threads, instruction set of the kernels, torch version: the head of every result file."""
    return {
        "date": datetime.date.today().isoformat(), "device": device_name(), "threads": threads,
        "isa": isa_in_use(), "torch": torch.__version__,
    }


def table_head(record: dict, *columns: str) -> None:
    """Print the head of a table of milliseconds. record: what `describe` gave."""
    heads = [f"{record['device']}, {record['threads']} threads, ms", *columns]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")


def write(name: str, record: dict) -> None:
    """Write benchmarks/results/NAME.json; the folder that OUT names in the environment, if it does.

    The instruction set is filled in where the kernels had not been loaded when `describe` looked.
    """
    if record.get("isa", "") is None:
        record["isa"] = isa_in_use()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def use(device: str, kernels: bool = True) -> None:
    """Work on this device as the decoders do; kernels: with ours, on a GPU. Raises InputError if torch cannot
    use it.
    """
    check_device(device)
    if torch.device(device).type == "cuda":
        use_device(torch.device(device), kernels)


def settle(device: torch.device | str) -> None:
    """Wait until the device has done what it was asked."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def captured(call: Callable[[], object], device: torch.device | str) -> Callable[[], object]:
    """A call over static tensors as a CUDA graph to replay, after two calls to warm up; on a CPU the call
    itself.
    """
    if torch.device(device).type != "cuda":
        return call
    settle(device)
    return capture(call)[0].replay


def median_seconds(call: Callable[[], object], device: torch.device | str, repeat: int = 8) -> float:
    """What a call takes until the device has done it: the median, after two calls that warm up."""
    times = []
    for _ in range(2 + repeat):
        settle(device)
        began = time.perf_counter()
        call()
        settle(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def memory_rates(device: torch.device | str) -> dict[str, float]:
    """Bytes per second that this device moves: "copy" reads and writes, "read" adds up."""
    n = 2**28 if torch.device(device).type == "cuda" else 2**26
    a, b = torch.zeros(n, device=device), torch.empty(n, device=device)
    works = {"copy": (lambda: b.copy_(a), 8 * n), "read": (lambda: a.sum(), 4 * n)}
    return {name: moved / median_seconds(work, device) for name, (work, moved) in works.items()}


def use_autotune() -> None:
    """Let torch.compile time several kernels for every product: `engine.runtime.Runtime.autotune`."""
    import torch._inductor.config as settings

    settings.max_autotune_gemm = settings.coordinate_descent_tuning = True


class Decoded(NamedTuple):
    """The answer of a contender to one prompt."""

    ids: list[int]
    tokens_per_second: float  # tokens after the first over the time after the first; 0 if there is no second
    accept_lengths: list[int]  # tokens emitted by each step; empty if that is not known
    steps: int = 0  # how many steps that were, if only this is known


Contender = Callable[[list[int], int], Decoded]  # takes a prompt as token ids and how many tokens to decode


def contender_of(model: TextDecoder) -> Contender:
    """One of our decoders as a contender, compiled and warm: no text is timed while a graph is captured."""
    model.warm_up(every_length=True)

    def decode(ids: list[int], tokens: int) -> Decoded:
        result = model.generate(ids, max_new_tokens=tokens)
        return Decoded(result.ids, result.tokens_per_second, result.accept_lengths)

    return decode


def time_in_turns(
    contenders: dict[str, Contender], prompts: list[list[int]], tokens: int
) -> list[dict[str, Decoded]]:
    """Let every contender decode every prompt, after a warm-up; another one begins each time.

    Returns the answers to each prompt by contender. Prompts with an answer of one token are left out, because
    it has no speed. Raises InputError if none is left.
    """
    for decode in contenders.values():
        decode(prompts[0], WARM_UP)
    rows = []
    for i, prompt in enumerate(prompts):
        answers = {name: contenders[name](prompt, tokens) for name in rotated([*contenders], i)}
        row = {name: answers[name] for name in contenders}
        if all(answer.tokens_per_second for answer in row.values()):
            rows.append(row)
        speeds = (f"{name} {answer.tokens_per_second:.1f}" for name, answer in row.items())
        note(f"  {i + 1}/{len(prompts)} {', '.join(speeds)}")
    if not rows:
        raise InputError("no question has an answer of more than one token: nothing to time")
    return rows


def pooled_tau(accept_lengths: Iterable[list[int]]) -> float:
    """Mean tokens per step, over the steps of all answers. Raises InputError if there are no steps."""
    lengths = [n for steps in accept_lengths for n in steps]
    if not lengths:
        raise InputError("no answer has more than one token: there is no acceptance length")
    return sum(lengths) / len(lengths)
