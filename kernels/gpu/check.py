"""Our kernels compared with their definitions, on this device and at a model's sizes.

`failures` runs `python -m kernels.gpu.check` (or a module that adds parts): a process of its own, as an
illegal address ends every later call of the process that meets it. It keeps the result beside the compiled
graphs. A backend without the kernels that failed computes by their definitions.
"""
from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn as nn
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import first_line
from common.files import atomic_path
from kernels.backend import TORCH, TorchBackend
from kernels.build import COMPILED, writable
from kernels.float8 import to_bytes
from kernels.gpu.backend import CudaBackend
from kernels.gpu.cache import Float8LayerCache, LayerCache, LayerCaches
from kernels.gpu.products import take
from kernels.quantized import QuantizedLinear
from model import Block, KVCaches, Linear, ModelArgs, Pass, Transformer, inverse_frequencies
from sampling.noise import seed_keys
from tree import Growth, TreeShape

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # of all parts, compilation included; what takes longer hangs
GUARD, EDGE, UNSET = 256, 0xA5, 0xFF  # bytes beside a tensor, their value, and that of what is not written
RECENT = 32  # allocations, more than a kernel has results and scratch
COLUMNS = 32768  # of a layer, at most: more are tiles of the same kernel
DENSE = "16 bits"  # the mode of layers that are not quantised
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative to 1 and to the number


class Sizes(NamedTuple):
    """The sizes that kernels are checked at.

    heads: query heads, key/value heads, numbers of a head. layers: (mode, group, outputs, inputs). rows: of a
    pass. lengths: of texts. repeats: how often a product is computed.
    """

    device: str
    dtype: str
    heads: tuple[int, int, int]
    norm: bool
    window: int
    float8: bool
    vocabulary: int
    layers: tuple[tuple[str, int, int, int], ...]
    tree: tuple[int, int, int] = (60, 7, 10)
    rows: tuple[int, ...] = (1, 10, 16, 60, 128)
    lengths: tuple[int, ...] = (0, 63, 64, 65, 3000)
    repeats: int = 1000

    @classmethod
    def of(cls, model: Transformer, float8: bool) -> Sizes:
        """Take the sizes of a target. float8: of its caches.

        A head is quantised to int8 when it is loaded, and its layers are like the target's.
        """
        args, weight = model.args, model.embed.weight
        found = set()
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and layer.mode != "fp8":
                found.add((layer.mode, layer.group, layer.weight.shape[0], layer.inputs))
            elif isinstance(layer, nn.Linear):
                found |= {(mode, 0, *layer.weight.shape) for mode in ("int8", DENSE)}
        return cls(
            str(weight.device), str(weight.dtype).removeprefix("torch."),
            (args.num_heads, args.num_kv_heads, args.head_dim), args.qk_norm, max(args.windows, default=0),
            float8, args.vocab_size,
            tuple(sorted({(mode, group, min(N, COLUMNS), K) for mode, group, N, K in found})),
        )


class Case(NamedTuple):
    """A part of a step at one size.

    run(backend): its results, tensors in any nesting. limit: of numbers. guards: its kernels, which no
    compiler sees, get guard bytes around what they write.
    """

    what: str
    run: Callable[[TorchBackend], object]
    limit: float = 0.0
    guards: bool = True


# -- cases -----------------------------------------------------------------------------------------


def _drawing(seed: int, device: str) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of a shape, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def owned(x: Tensor) -> Tensor:
    """Return a copy that a kernel may change, between guard bytes within `guarded`."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def attention(
    device: str, dtype: torch.dtype, B: int, T: int, nh: int, nkv: int, hd: int, M: int,
    lengths: tuple[int, ...], norm: bool = False, window: int = 0, float8: bool = False, unseen: int = 0,
) -> Case:
    """Attention of T rows that see some of the M slots after `lengths` [B], but the first `unseen` never.

    Slots after those hold NaN, which the kernel does not read; the definition, which multiplies them by 0,
    gets zeros.
    """
    draw, slots = _drawing(B * 1000 + T * 10 + M, device), max(lengths) + M + 64
    args = ModelArgs(32, nh * hd, 32, 2, nh, nkv, hd, qk_norm=norm, windows=(window,) * 2)
    block = Block(args).requires_grad_(False).to(device, dtype)
    if norm:
        for one in (block.q_norm, block.k_norm):
            one.weight.copy_(draw(hd).abs() + 0.5)
    qkv, length = draw(B, T, (nh + 2 * nkv) * hd).to(dtype), torch.tensor(lengths, device=device)
    cached, local = draw(2, 2, B, nkv, slots, hd).to(dtype), draw(B, T, M) > 0.25
    local[:, :, :unseen] = False
    local[:, torch.arange(T), M - T + torch.arange(T)] = True  # a row sees itself
    own, at = length[:, None] + M - T + torch.arange(T, device=device), torch.arange(slots, device=device)
    hidden = (at >= length[:, None] + M)[:, None, :, None]

    def run(backend: TorchBackend):
        kv = cached.masked_fill(hidden, 0.0 if backend is TORCH else float("nan"))
        kv = owned(to_bytes(kv) if float8 else kv)
        visible = backend.visible_slots(at, length, local)
        shared = Pass(args, inverse_frequencies(args).to(device), own + 3, own, visible)
        out = (Float8LayerCache if float8 else LayerCache)(kv, 1).attend(block, qkv, shared)
        held = kv.view(torch.float8_e4m3fn).float() if float8 else kv
        return out, [held[:, :, b, :, : n + M] for b, n in enumerate(lengths)]

    return Case(f"{B} x {T} rows of {M} after {lengths} tokens", run, 0.13 if float8 else LIMITS[dtype])


def _attend(s: Sizes) -> Iterator[Case]:
    dtype = getattr(torch, s.dtype)
    for T in s.rows:
        for n in s.lengths:
            yield attention(s.device, dtype, 1, T, *s.heads, T, (n,), s.norm, 0, s.float8)
    width, few = s.tree[2], s.lengths[1:4]
    yield attention(s.device, dtype, len(few), width, *s.heads, 3 * width, few, s.norm, 0, s.float8)
    yield attention(s.device, dtype, 1, width, *s.heads, 160 + width, (64,), s.norm, 0, s.float8, 160)
    if s.window:
        two = s.lengths[-2:]
        yield attention(s.device, dtype, 2, width, *s.heads, width, two, s.norm, s.window, s.float8)


def _linear(s: Sizes) -> Iterator[Case]:
    dtype = getattr(torch, s.dtype)
    for mode, group, N, K in s.layers:
        draw, generator = _drawing(N + K, s.device), torch.Generator(s.device).manual_seed(N)
        if mode == DENSE:
            layer = Linear(K, N, bias=False).requires_grad_(False).to(s.device, dtype)
            layer.weight.normal_(generator=generator).mul_(K**-0.5)
        else:
            layer = QuantizedLinear(K, N, False, mode, group).to(s.device)
            layer.weight.random_(*(0, 256) if group else (-127, 128), generator=generator)
            layer.scale.copy_((0.5 + draw(*layer.scale.shape).abs()) * K**-0.5 / (4 if group else 64))
        take(ours := copy.deepcopy(layer))
        layer.float()
        for M in s.rows:
            x, onto = draw(M, K).to(dtype), draw(M, N).to(dtype)

            def run(backend: TorchBackend, x=x, onto=onto, layer=layer, ours=ours):
                if backend is TORCH:
                    return onto + layer(x.float()).to(dtype)
                first, same = ours(x, onto), torch.ones((), dtype=torch.bool, device=s.device)
                for _ in range(s.repeats - 1):
                    same &= (ours(x, onto) == first).all()
                if not same:
                    raise AssertionError("repeated, it gives other numbers")
                return first

            yield Case(f"{mode} {N} x {K}, {M} rows", run, LIMITS[dtype])


def _logits(s: Sizes, rows: int, seed: int = 0) -> Tensor:
    return 3 * _drawing(seed, s.device)(2, rows, s.vocabulary)


def _rank(s: Sizes) -> Iterator[Case]:
    k = min(s.tree[2], s.vocabulary)
    names = torch.randperm(s.vocabulary, generator=torch.Generator().manual_seed(1)).to(s.device)
    for rows, noise, called in ((1, None, None), (k, _logits(s, 1, 1), names), (k, _logits(s, k, 2), None)):
        logits = _logits(s, rows)
        yield Case(f"{k} of 2 x {rows} x {s.vocabulary}",
                   lambda b, x=logits, n=noise, c=called: b.rank(x, n, k, c), 1e-5)


def _largest(s: Sizes) -> Iterator[Case]:
    for rows in s.rows[:4]:
        logits, depth = _logits(s, rows), torch.arange(rows, device=s.device).expand(2, -1) % 5
        logits[0, 0, 3] = logits[0, 0, 5] = 50.0  # a tie: the first
        for noise in (None, _logits(s, 5, 1)):
            yield Case(f"2 x {rows} x {s.vocabulary}",
                       lambda b, x=logits, n=noise, d=depth: b.largest(x, n, d))


def _growth(s: Sizes, extend: Callable, seen: list) -> Growth:
    """Grow the tree of two sequences by random scores; equal ones are rare."""
    draw, shape = _drawing(3, s.device), TreeShape(*s.tree)
    k = shape.width

    def children(*size: int) -> tuple[Tensor, Tensor]:
        return -draw(2, *size).abs(), draw(2, *size).mul(99).long().abs()

    grown = Growth(shape, *children(k))
    for level in range(shape.depth):
        row = extend(grown, *children(k, k), level + 1 < shape.depth)
        if level + 1 < shape.depth:
            seen += [row, grown.beam_scores, grown.beam_tokens, grown.beam_flat, grown.beam_sees]
    seen += grown.candidates
    return grown


def _extend(s: Sizes) -> Iterator[Case]:
    def run(backend: TorchBackend) -> list:
        _growth(s, backend.extend, seen := [])
        return seen

    yield Case(f"{s.tree[1]} levels of {s.tree[2]}", run)


def _prune(s: Sizes) -> Iterator[Case]:
    root = torch.tensor([5, 7], device=s.device)
    yield Case("the tree {}/{}/{}".format(*s.tree),
               lambda backend: backend.prune(_growth(s, TORCH.extend, []), root))


def _accept(s: Sizes) -> Iterator[Case]:
    tree = _growth(s, TORCH.extend, []).prune(torch.tensor([5, 7], device=s.device))
    # One sequence takes each node's last child, the other nothing.
    chosen = torch.zeros_like(tree.tokens).scatter(1, tree.parent, tree.tokens)
    chosen[1] = -1
    yield Case("the tree {}/{}/{}".format(*s.tree),
               lambda backend: backend.accept(tree, chosen, s.tree[1] + 2))


def _emit(s: Sizes) -> Iterator[Case]:
    def run(backend: TorchBackend) -> list:
        """Texts that go on, stop at an id, reach their limit, have ended."""
        def of(*numbers, dtype=torch.int64):
            return owned(torch.tensor(numbers, dtype=dtype, device=s.device))

        state = SimpleNamespace(
            tokens=owned(torch.arange(160, device=s.device).view(4, 40)), length=of(3, 4, 5, 6),
            limit=of(30, 30, 7, 30), done=of(0, 0, 0, 1, dtype=torch.bool), stop_ids=of(2, 9),
            out=owned(torch.zeros(4, 8, dtype=torch.int64, device=s.device)),
        )
        tokens = torch.tensor([[5, 6, 7], [5, 2, 7], [5, 6, 7], [5, 6, 7]], device=s.device)
        count = backend.emit(state, tokens, torch.tensor([2, 3, 3, 3], device=s.device))
        return [count, state.tokens, state.length, state.done, state.out]

    yield Case("4 sequences", run)


def _move(s: Sizes) -> Iterator[Case]:
    _, nkv, hd = s.heads
    kv = _drawing(4, s.device)(2, 2, 2, nkv, 90, hd).to(getattr(torch, s.dtype))
    target = torch.tensor([[5], [64]], device=s.device) + torch.arange(9, device=s.device)
    source = target + torch.tensor([0, 1, 0, 3, 2, 5, 1, 0, 4], device=s.device)  # overlaps what is written

    def run(backend: TorchBackend) -> Tensor:
        moved = owned(to_bytes(kv) if s.float8 else kv)
        move = KVCaches.move if backend is TORCH else LayerCaches.move
        move(LayerCaches._over(moved), source, target)
        return moved

    yield Case("9 slots of 2 layers", run)


def _gumbel(s: Sizes) -> Iterator[Case]:
    key = seed_keys([3, 2**40 + 5], s.device)
    positions, warm = torch.tensor([[0, 1, 2], [7, 8, 2**20]], device=s.device), torch.tensor([1.0, 0.5])
    yield Case(f"2 x 3 x {s.vocabulary}",
               lambda backend: backend.gumbel(key, positions, warm.to(s.device), s.vocabulary), 3e-6)


def _restrict(s: Sizes) -> Iterator[Case]:
    warm = torch.tensor([0.7, 1.3], device=s.device)
    for top_k, top_p in ((0, 0.9), (0, 1e-6), (1, 1.0), (50, 0.95), (s.vocabulary // 2, 0.999)):
        logits = _logits(s, 3, top_k)
        logits[0, 0, :7] = logits[0, 0].max()  # ties, also of the two zeros
        logits[0, 1, :9], logits[0, 1, 4:6], logits[0, 2, 50:] = 0.0, -0.0, float("-inf")
        k, p = torch.full((2,), top_k, device=s.device), torch.full((2,), top_p, device=s.device)
        yield Case(f"the best {top_k}, {top_p:g} of 2 x 3 x {s.vocabulary}",
                   lambda b, x=logits, k=k, p=p: b.restrict(x, warm, k, p))


# By the name of what is left out if a case fails: see `CudaBackend.without`.
PARTS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "attend": _attend, "linear": _linear, "rank": _rank, "largest": _largest, "extend": _extend,
    "prune": _prune, "accept": _accept, "emit": _emit, "move": _move, "gumbel": _gumbel,
    "restrict": _restrict,
}


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
                what = case.what
                check(case, backend)
        except Exception as e:  # whatever a compiler or a device raises
            failed = failed | {name: f"{what}: {first_line(e)}" if what else first_line(e)}
            say(json.dumps({"part": name, "error": failed[name]}))
            if sizes.device != "cpu":
                torch.cuda.synchronize()
    say(json.dumps({"ended": True}))


def main(parts: dict[str, Callable] = PARTS) -> None:
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
    sizes: Sizes, say: Callable[[str], None], parts: Collection[str] = tuple(PARTS),
    command: tuple[str, ...] = (sys.executable, "-m", "kernels.gpu.check"),
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


if __name__ == "__main__":
    main()
