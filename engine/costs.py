"""What the passes of a step cost here: the target's over T rows, the drafter's over k, at two contexts.

Between and beyond these a cost is linear in the context. Rows of several texts cost what as many rows of one
text do, and for each further text the reading of its keys and values.
They are measured once for a model, its precision, the processor, its instruction set and threads, and kept in
costs.json beside the head.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from common.errors import InputError
from common.files import read_json, write_text
from common.schema import Digits, Map, Number, Record, Wrong
from drafters.network import HeadDrafter
from engine.calibration import LONG, SHORT
from engine.capture import capture
from engine.compiling import compile_graph, unguarded
from engine.state import State
from kernels.backend import backend_of
from kernels.build import digest
from kernels.gpu import here
from kernels.isa import processor_name
from model import Transformer
from tree import TreeShape

FILE = "costs.json"
VERIFY_ROWS, LEVEL_ROWS = (1, 2, 4, 6, 8, 12, 16, 32), (1, 4, 10)
BATCH_ROWS = (24, 48, 64)  # of the target's pass too, where several texts are decoded together
# On a GPU, where a pass over so many rows may take the time of one.
MANY_VERIFY_ROWS, MANY_LEVEL_ROWS = (1, 16, 32, 64, 96, 128, 192, 256, 512), (1, 10, 40, 80, 160, 320)
TEXTS, MANY_TEXTS = 8, 16  # of one row each, beside as many rows of one text; the second on a GPU
BUDGET = 2.0  # seconds of measuring; and of each of the first MIN_REPEAT turns, of which only one is sure
MIN_REPEAT, MAX_REPEAT = 3, 15

PASSES = ("verify", "read", "level", "texts")  # in the order of `Costs`
_BY_ROWS = Map(Number(above=0, high=1e9), keys=Digits())
_MILLISECONDS = Map(_BY_ROWS, keys=Digits())  # by context
KEPT = Record(
    {f"{name}_ms": _MILLISECONDS for name in PASSES[:-1]}, {f"{PASSES[-1]}_ms": _MILLISECONDS}
)
Seconds = dict[int, dict[int, float]]  # by context, by rows


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by context and rows: of the target (`verify`) and of the drafter.

    Its first pass of a step (`read`, rows: those it catches up on) finds the head's weights far away, those
    of further levels (`level`) find them in a cache. texts: of the target over one row each of so many texts,
    at the shortest context only, and only where several are decoded together.
    """

    verify: Seconds
    read: Seconds
    level: Seconds
    texts: Seconds = field(default_factory=dict)

    @classmethod
    def of(cls, record: dict) -> Costs:
        """What a file keeps of them, in milliseconds. Raises ValueError."""
        KEPT.check(record, "costs")
        return cls(*(
            {int(n): {int(rows): t / 1e3 for rows, t in by_rows.items()} for n, by_rows in part.items()}
            for part in (record.get(f"{name}_ms", {}) for name in PASSES)
        ))

    def check(self, contexts: tuple[int, ...], device: torch.device, batches: bool) -> None:
        """Raise ValueError unless these are times of all passes that are measured, at these contexts."""
        parts = zip((self.verify, self.read, self.level, self.texts), rows_of(device, batches))
        for name, (part, sizes) in zip(PASSES, parts):
            wanted = contexts if part is not self.texts else contexts[:1] if batches else ()
            found = [(f"{name}_ms", part.keys(), wanted)]
            found += [(f"{name}_ms.{context}", by_rows.keys(), sizes) for context, by_rows in part.items()]
            for key, keys, expected in found:
                if keys != set(expected):
                    raise Wrong(key, sorted(keys), f"{', '.join(map(str, expected)) or 'none'}, all of them")

    def step(self, shape: TreeShape | None, context: int, batch: int = 1, reads: int = 0) -> float:
        """Seconds of a step with a tree of this shape, None: of plain decoding.

        reads: rows of the head's catch-up, if they are more than the tree's window.
        """
        others = (batch - 1) * self.text(context)
        if shape is None:
            return _at(self.verify, context, batch) + others
        catch_up = _at(self.read, context, batch * max(reads, shape.window))
        levels = shape.depth * _at(self.level, context, batch * shape.width)
        return _at(self.verify, context, batch * shape.nodes) + others + catch_up + levels

    def text(self, context: int) -> float:
        """Seconds that one more text of this context adds to a pass, beside those of its rows."""
        for measured, by_count in self.texts.items():
            for count, seconds in by_count.items():
                more = max(seconds - between(self.verify[measured], count), 0.0)
                return more / (count - 1) * context / measured
        return 0.0


def _at(seconds: Seconds, context: int, rows: int) -> float:
    at = {n: between(by_rows, rows) for n, by_rows in seconds.items()}
    return at[min(at)] if len(at) == 1 else between(at, context)


def between(measured: dict[int, float], at: int) -> float:
    """A cost, linear between the nearest sizes that were measured, and beyond them; never below the least."""
    sizes = sorted(measured)
    if len(sizes) == 1:
        return measured[sizes[0]]
    high = next((n for n in sizes[1:] if n >= at), sizes[-1])
    low = sizes[sizes.index(high) - 1]
    share = (at - low) / (high - low)
    return max(measured[low] + (measured[high] - measured[low]) * share, min(measured.values()))


def rows_of(device: torch.device, batches: bool) -> tuple[tuple[int, ...], ...]:
    """The rows at which each of PASSES is measured. batches: for several texts at a time, too."""
    if device.type == "cuda":
        verify, level, texts = MANY_VERIFY_ROWS, MANY_LEVEL_ROWS, MANY_TEXTS
    else:
        verify, level, texts = VERIFY_ROWS + BATCH_ROWS * batches, LEVEL_ROWS, TEXTS
    return verify, level, level, (texts,) * batches


class Passes:
    """The passes of a step alone, over caches of their own that hold `context` tokens.

    On a GPU they are captured, and not compiled: what compiling saves is the same for every number of rows.
    """

    def __init__(
        self, target: Transformer, drafter: HeadDrafter, compile: bool, context: int, batches: bool,
        texts: bool,
    ):
        """texts: time passes over several texts, too."""
        self.target, self.drafter = target, drafter.with_tree(drafter.shape)
        self.backend = backend_of(target)
        weight = target.embed.weight
        self.device, dtype = weight.device, weight.dtype
        self.verify_rows, self.level_rows, _, counts = rows_of(self.device, batches)
        room = max(*self.verify_rows, *self.level_rows) + drafter.extra_slots
        live = context + room
        self.slots = torch.arange(live, device=self.device)
        self.length = torch.full((1,), context, device=self.device)
        self.caches = target.caches(1, live)
        self.text_caches = {count: target.caches(count, live) for count in counts if texts}
        self.drafter.allocate(1, live, room, dtype, self.device)
        self.feature = torch.zeros(1, 1, drafter.head.args.hidden_size, dtype=dtype, device=self.device)
        self.verify_pass, self.read_pass, self.level_pass = (
            compile_graph(f, dynamic=False) if compile else f
            for f in (self._verify, self._read, self.drafter.level_pass)
        )

    def _verify(self, tokens: Tensor, own: Tensor, caches: nn.ModuleList) -> Tensor:
        visible = self._seen(self.slots, self.length, own)
        x, _ = self.target(tokens, own, own, visible, caches, self.drafter.aux_layers)
        return self.backend.draw(self.target.logits(x), None)

    def _read(self, state: State) -> tuple[Tensor, Tensor]:
        return self.drafter.first_pass(state, self.slots)

    def _seen(self, slots: Tensor, length: Tensor, own: Tensor) -> Tensor:
        """All that is committed, and all rows of the pass."""
        length = length.expand(len(own))
        return self.backend.visible_slots(slots, length, torch.ones_like(own[..., None] == own[:, None]))

    def _state(self, rows: int) -> State:
        """Where a sequence stands of which the drafter has not read so many tokens."""
        width = len(self.drafter.aux_layers) * self.target.args.hidden_size
        state = State(
            1, len(self.slots) + 1, rows, width, (), self.feature.dtype, self.device,
            vocabulary=self.target.args.vocab_size, backend=self.backend,
        )
        state.length.copy_(self.length)
        state.n_new.fill_(min(rows, int(self.length)))
        return state

    def calls(self) -> dict[tuple[str, int], Callable[[], object]]:
        """What is timed, by pass and rows."""
        calls: dict[tuple[str, int], Callable[[], object]] = {}
        kept = self.drafter.kept
        slots, length = kept.live(self.slots), kept.first(self.length)  # the head's
        for rows in self.verify_rows:
            calls["verify", rows] = partial(self.verify_pass, *self._rows(self.length, rows), self.caches)
        for count, caches in self.text_caches.items():
            one = (x.expand(count, -1).contiguous() for x in self._rows(self.length, 1))
            calls["texts", count] = partial(self.verify_pass, *one, caches)
        for rows in self.level_rows:
            calls["read", rows] = partial(self.read_pass, self._state(rows))
            tokens, own = self._rows(length, rows)
            feature = self.feature.expand(-1, rows, -1).contiguous()
            visible = self._seen(slots, length, own)
            calls["level", rows] = partial(self.level_pass, self.backend, tokens, feature, own, visible)
        return {key: self._captured(call) for key, call in calls.items()}

    @staticmethod
    def _rows(length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and slots of so many rows [1, count] after a text of this length [1]."""
        own = length[:, None] + torch.arange(count, device=length.device)
        return torch.zeros_like(own), own

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        if self.device.type != "cuda":
            return call
        with torch.cuda.device(self.device):
            return capture(call)[0].replay

    def settle(self) -> None:
        """Wait until the device has done what it was asked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def measure(
    target: Transformer, drafter: HeadDrafter, compile: bool, contexts: tuple[int, ...], batches: bool = False
) -> Costs:
    """Time the passes at these contexts. batches: as several texts at a time take them, too.

    They take turns, so that a machine that is slow for a while is slow for all; of each the lower quartile,
    as other work on the machine only slows them. compile: run them through torch.compile, as a step does that
    is not on our kernels.
    """
    passes = {n: Passes(target, drafter, compile, n, batches, n == contexts[0]) for n in contexts}
    calls = {(n, *key): call for n, some in passes.items() for key, call in some.calls().items()}
    times: dict[tuple[int, str, int], list[float]] = {}
    settle = next(iter(passes.values())).settle

    def timed(context: int, name: str, rows: int, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        settle()
        times.setdefault((context, name, rows), []).append(time.perf_counter() - start)

    with backend_of(target).threads():
        for call in calls.values():  # compile, touch the caches
            call()
        settle()
        with unguarded() if compile else contextlib.nullcontext():
            began = time.perf_counter()
            for turn in range(MAX_REPEAT):
                spent = time.perf_counter() - began
                if turn and spent > BUDGET * (1 if turn >= MIN_REPEAT else turn):
                    break
                for (context, name, rows), call in calls.items():
                    if name == "read":  # it finds the target's weights where its own were
                        calls[context, "verify", 1]()
                    timed(context, name, rows, call)
    typical = {key: sorted(t)[len(t) // 4] for key, t in times.items()}
    found: list[Seconds] = [{} for _ in PASSES]
    for (context, name, rows), seconds in typical.items():
        found[PASSES.index(name)].setdefault(context, {})[rows] = seconds
    return Costs(*found)


def measured_once(
    target: Transformer, drafter: HeadDrafter, compile: bool, longest: int, folder: Path,
    say: Callable[[str], None], batches: bool = False,
) -> Costs:
    """The costs from FOLDER/costs.json, if they were measured under these conditions; else measured now.

    longest: tokens that a text may have. folder: the head's; if it cannot be written, every start measures.
    say: told what is done. batches: those of several texts at a time, too. Raises InputError on a file that
    is damaged.
    """
    contexts = (SHORT, LONG) if longest >= LONG else (SHORT, longest) if longest > 2 * SHORT else (SHORT,)
    made_by, file = json.dumps(conditions(target, drafter, compile, contexts, batches)), folder / FILE
    try:
        kept = read_json(file) if file.exists() else {}
    except InputError as e:
        raise InputError(f"{e}; delete it") from None
    if made_by in kept:
        try:
            costs = Costs.of(kept[made_by])
            costs.check(contexts, target.embed.weight.device, batches)
        except ValueError as e:
            raise InputError(f"{file}: damaged: {e}; delete it") from None
        return costs
    say("measuring what the passes of a step cost on this machine ...")
    costs = measure(target, drafter, compile, contexts, batches)
    kept[made_by] = found = {
        f"{name}_ms": {
            str(n): {str(r): round(t * 1e3, 4) for r, t in by_rows.items()} for n, by_rows in part.items()
        }
        for name, part in asdict(costs).items() if part
    }
    KEPT.check(found, "costs")
    with contextlib.suppress(OSError):  # a cache: measured again next time
        write_text(file, json.dumps(kept, indent=1) + "\n")
    return costs


def conditions(
    target: Transformer, drafter: HeadDrafter, compile: bool, contexts: tuple[int, ...], batches: bool = False
) -> dict:
    """What costs depend on."""
    weight, reach = target.embed.weight, drafter.kept.reach
    on_cuda = weight.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(weight.device) if on_cuda else processor_name(),
        "isa": backend_of(target).name,
        "threads": 0 if on_cuda else torch.get_num_threads(), "dtype": str(weight.dtype), "compile": compile,
        "cache": target.Caches.__name__,
        "target": _sizes(target), "head": _sizes(drafter.head),
        "drafter": type(drafter).__name__, "contexts": contexts, "torch": torch.__version__,
        "kernels": here.digest() if on_cuda else digest(), **({"batches": True} if batches else {}),
        **({"reach": reach} if reach else {}),
    }


def _sizes(model: nn.Module) -> str:
    """A digest of the names, types and shapes of all weights."""
    listed = [(name, str(p.dtype), tuple(p.shape)) for name, p in model.named_parameters()]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]
