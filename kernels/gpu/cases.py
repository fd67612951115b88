"""The parts of a step at the sizes of a model, for `kernels.gpu.check`: an entry of `PARTS` for each."""
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn as nn
from torch import Tensor

from families.experts import Experts, MixtureArgs
from kernels.backend import TORCH, TorchBackend
from kernels.float8 import to_bytes
from kernels.gpu import products
from kernels.gpu.backend import CudaBackend
from kernels.gpu.cache import Float8LayerCache, LayerCache, LayerCaches
from kernels.gpu.here import shared_memory
from kernels.quantized import MXFP4, QuantizedLinear, QuantizedStack, Scheme, replace_all
from model import Block, KVCaches, ModelArgs, Pass, Transformer
from sampling.noise import seed_keys
from tree import Growth, TreeShape

COLUMNS = 32768  # of a layer, at most: more are tiles of the same kernel
MOST_EXPERTS, MOST_INNER = 8, 1024  # of a mixture, likewise
DENSE = "16 bits"  # the mode of experts that are not quantised
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # relative to 1 and to the number


class Sizes(NamedTuple):
    """The sizes that kernels are checked at.

    heads: query heads, key/value heads, numbers of a head. layers: (mode, group, outputs, inputs). rows: of a
    product. lengths: of texts. repeats: how often a product is computed. mixtures: (mode, group, experts,
    those of a row, inner size, inputs, has biases).
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
    rows: tuple[int, ...] = (1, 16, 24, 60, 128, 130)  # one for each height of a tile, and two tiles
    lengths: tuple[int, ...] = (0, 63, 64, 65, 3000)
    repeats: int = 1000
    mixtures: tuple[tuple[str, int, int, int, int, int, bool], ...] = ()

    @classmethod
    def of(cls, model: Transformer, float8: bool) -> Sizes:
        """Take the sizes of a target. float8: of its caches.

        A head is quantised to int8 when it is loaded. Its layers are like the target's, but an EAGLE-3 head
        reads three states, and the token beside them.
        """
        args, weight = model.args, model.embed.weight
        H, heads = args.hidden_size, args.num_heads + 2 * args.num_kv_heads
        found, mixtures = {("int8", 0, H, 3 * H), ("int8", 0, heads * args.head_dim, 2 * H)}, set()
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and layer.mode != "fp8":
                found.add((layer.mode, layer.group, min(layer.outputs, COLUMNS), layer.inputs))
            elif isinstance(layer, nn.Linear):
                found.add(("int8", 0, min(layer.out_features, COLUMNS), layer.in_features))
            elif isinstance(layer, Experts) and getattr(layer.w_down, "mode", None) != "fp8":
                mixtures.add(_mixture(layer))
        return cls(
            str(weight.device), str(weight.dtype).removeprefix("torch."),
            (args.num_heads, args.num_kv_heads, args.head_dim), args.qk_norm, max(args.windows, default=0),
            float8, args.vocab_size, tuple(sorted(found)), mixtures=tuple(sorted(mixtures)),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal numbers, the same on every device."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def tensor(self, *values, dtype: torch.dtype | None = None) -> Tensor:
        """Return values on the device, in memory that a kernel may change."""
        return owned(torch.tensor(values, dtype=dtype, device=self.device))


class Case(NamedTuple):
    """A part of a step at one size.

    run(backend): its results, tensors in any nesting. limit: of numbers. repeats: how often it is computed
    again, for the very same numbers. guards: its kernels, which no compiler sees, get guard bytes around what
    they write.
    """

    what: str
    run: Callable[[TorchBackend], object]
    limit: float = 0.0
    repeats: int = 1
    guards: bool = True


def owned(x: Tensor) -> Tensor:
    """Return a copy that a kernel may change, between guard bytes within `check.guarded`."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


# -- networks --------------------------------------------------------------------------------------


def attention(s: Sizes, B: int, T: int, M: int, lengths: tuple[int, ...], unseen: int = 0) -> Case:
    """Attention of T rows that see some of the M slots after `lengths` [B], but the first `unseen` never.

    Slots after those hold NaN, which the kernel does not read; the definition, which multiplies them by 0,
    gets zeros.
    """
    (nh, nkv, hd), dtype, device = s.heads, s.torch_dtype, s.device
    draw, slots = partial(s.draw, seed=B * 1000 + T * 10 + M), max(lengths) + M + 64
    args = ModelArgs(32, nh * hd, 32, 2, nh, nkv, hd, qk_norm=s.norm, windows=(s.window,) * 2)
    block = Block(args).requires_grad_(False).to(device, dtype)
    if s.norm:
        for one in (block.q_norm, block.k_norm):
            one.weight.copy_(draw(hd).abs() + 0.5)
    qkv, length = draw(B, T, (nh + 2 * nkv) * hd).to(dtype), torch.tensor(lengths, device=device)
    cached, local = draw(2, 2, B, nkv, slots, hd).to(dtype), draw(B, T, M) > -0.7
    local[:, :, :unseen] = False
    local[:, torch.arange(T), M - T + torch.arange(T)] = True  # a row sees itself
    own, at = length[:, None] + M - T + torch.arange(T, device=device), torch.arange(slots, device=device)
    hidden = (at >= length[:, None] + M)[:, None, :, None]

    def run(backend: TorchBackend):
        kv = cached.masked_fill(hidden, 0.0 if backend is TORCH else float("nan"))
        kv = owned(to_bytes(kv) if s.float8 else kv)
        visible = backend.visible_slots(at, length, local)
        shared = Pass(args, args.inverse_frequencies().to(device), own + 3, own, visible)
        out = (Float8LayerCache if s.float8 else LayerCache)(kv, 1).attend(block, qkv, shared)
        held = kv.view(torch.float8_e4m3fn).float() if s.float8 else kv
        return out, [held[:, :, b, :, : n + M] for b, n in enumerate(lengths)]

    return Case(f"{B} x {T} rows of {M} after {lengths} tokens", run, 0.13 if s.float8 else LIMITS[dtype])


def _attend(s: Sizes) -> Iterator[Case]:
    whole, (nodes, _, width) = s._replace(window=0), s.tree
    for T in sorted({1, min(8, nodes), nodes}):  # a tile of 16, of 32 and of 64 rows with groups of four
        for n in s.lengths:
            yield attention(whole, 1, T, T, (n,))
    # The rows of a draft level. None sees the first tiles after the committed slots.
    yield attention(whole, len(s.lengths), width, 160 + 3 * width, s.lengths, 160)
    # A head may have a window where the target has none.
    yield attention(s._replace(window=s.window or 48), 2, width, width, s.lengths[-2:])


def _linear(s: Sizes) -> Iterator[Case]:
    for mode, group, N, K in s.layers:
        layer = QuantizedLinear(K, N, False, mode, group)
        ours = copy.deepcopy(_fill(layer).to(s.device))
        CudaBackend().prepare(ours)
        layer.float()
        kind = s.torch_dtype, 4 if group else 8
        for M in s.rows:
            x, onto = s.draw(M, K, seed=N + K).to(s.torch_dtype), s.draw(M, N, seed=N).to(s.torch_dtype)
            for choice, tile in enumerate(products.tiles(products.tile_rows(M, *kind), *kind, shared_memory(torch.device(s.device)))):

                def run(backend: TorchBackend, x=x, onto=onto, layer=layer, ours=ours, choice=choice):
                    if backend is TORCH:
                        return onto + layer(x.float()).to(x.dtype)
                    with patch.object(products, "choice", choice):
                        return ours(x, onto)

                what = f"{mode} {N} x {K}, {M} rows" + ", tiles of {COLUMNS} x {DEPTH}".format(**tile.kwargs)
                yield Case(what, run, LIMITS[s.torch_dtype], s.repeats)


def _fill(layer: nn.Module) -> nn.Module:
    """Make the weights of a layer random numbers whose products are near 1, and return it."""
    draw = torch.Generator().manual_seed(0)
    for x in layer.requires_grad_(False).parameters():
        if x.is_floating_point():
            x.copy_(torch.randn(x.shape, generator=draw) * x.shape[-1] ** -0.5)
    for part in layer.modules():
        if isinstance(part, QuantizedLinear | QuantizedStack):
            part.weight.random_(*((0, 256) if part.group else (-127, 128)), generator=draw)
            if part.mode == MXFP4:
                power = 125 - round(math.log2(part.inputs) / 2)
                part.scale.random_(power - 1, power + 2, generator=draw)
            else:
                part.scale.copy_((0.5 + torch.rand(part.scale.shape, generator=draw)) * part.inputs**-0.5)
                part.scale.div_(4 if part.group else 64)
    return layer


def _mixture(layer: Experts) -> tuple[str, int, int, int, int, int, bool]:
    """Return the sizes of a mixture, fewer and narrower experts that the same tiles divide."""
    stack, H, E = layer.w_down, layer.router.in_features, min(layer.router.out_features, MOST_EXPERTS)
    quantised = isinstance(stack, QuantizedStack)
    mode, group, inner = (stack.mode, stack.group, stack.inputs) if quantised else (DENSE, 0, stack.shape[-1])
    inner = min(inner, MOST_INNER + inner % MOST_INNER)
    return mode, group, E, min(layer.used, max(E // 2, 1)), inner, H, layer.down_bias is not None


def _experts(s: Sizes) -> Iterator[Case]:
    """Random routing, and routing where all rows choose the first expert and none the last one."""
    for mode, group, E, A, inner, H, biases in s.mixtures:
        args = MixtureArgs(8, H, inner, 1, 1, 1, 8, num_experts=E, experts_per_token=A, biases=biases)
        layer = Experts(args).to(s.torch_dtype)
        if mode != DENSE:
            scheme = Scheme(None, 0, None, MXFP4) if mode == MXFP4 else Scheme(mode, group, None)
            replace_all(layer, scheme)
        ours = copy.deepcopy(_fill(layer).to(s.device))
        CudaBackend().prepare(ours)
        layer.float()
        for M, skewed in product(s.rows, (False, True)):
            scores = s.draw(M, E, seed=M)
            scores[:, -1] -= 9 * skewed
            scores[:, 0] += 9 * skewed
            x, weight = s.draw(M, H, seed=H).to(s.torch_dtype), s.draw(M, A).softmax(-1).to(s.torch_dtype)

            def run(backend: TorchBackend, x=x, w=weight, at=scores.topk(A).indices, layer=layer, ours=ours):
                if backend is TORCH:
                    return layer.mixed(x.float(), w.float(), at).to(x.dtype)
                return ours.mixed(x, w, at)

            routing = "one for all" if skewed else "random"
            yield Case(f"{mode} {E} x {inner} x {H}, {M} rows, {routing}", run, LIMITS[s.torch_dtype])


def _move(s: Sizes) -> Iterator[Case]:
    _, nkv, hd = s.heads
    kv = s.draw(2, 2, 2, nkv, 90, hd).to(s.torch_dtype)
    target = torch.tensor([[5], [64]], device=s.device) + torch.arange(9, device=s.device)
    source = target + torch.tensor([0, 1, 0, 3, 2, 5, 1, 0, 4], device=s.device)  # overlaps what is written

    def run(backend: TorchBackend) -> Tensor:
        moved = owned(to_bytes(kv) if s.float8 else kv)
        move = KVCaches.move if backend is TORCH else LayerCaches.move
        move(LayerCaches._over(moved), source, target)
        return moved

    yield Case("9 slots of 2 layers", run)


# -- logits ----------------------------------------------------------------------------------------


def _logits(s: Sizes, rows: int, seed: int = 0) -> Tensor:
    return 3 * s.draw(2, rows, s.vocabulary, seed=seed)


def _rank(s: Sizes) -> Iterator[Case]:
    k = min(s.tree[2], s.vocabulary)
    names = torch.randperm(s.vocabulary, generator=torch.Generator().manual_seed(1)).to(s.device)
    for rows, noise, called in ((1, None, None), (k, _logits(s, 1, 1), names), (k, _logits(s, k, 2), None)):
        logits = _logits(s, rows)
        yield Case(f"{k} of 2 x {rows} x {s.vocabulary}",
                   lambda b, x=logits, n=noise, c=called: b.rank(x, n, k, c), 1e-5)


def _largest(s: Sizes) -> Iterator[Case]:
    for rows in (1, s.tree[0]):
        logits, depth = _logits(s, rows), torch.arange(rows, device=s.device).expand(2, -1) % 5
        logits[0, 0, 3] = logits[0, 0, 5] = 50.0  # a tie: the first
        for noise in (None, _logits(s, 5, 1)):
            yield Case(f"2 x {rows} x {s.vocabulary}",
                       lambda b, x=logits, n=noise, d=depth: b.largest(x, n, d))


def _gumbel(s: Sizes) -> Iterator[Case]:
    key = seed_keys([3, 2**40 + 5], s.device)
    positions, warm = torch.tensor([[0, 1, 2], [7, 8, 2**20]], device=s.device), s.tensor(1.0, 0.5)
    yield Case(f"2 x 3 x {s.vocabulary}", lambda b: b.gumbel(key, positions, warm, s.vocabulary), 3e-6)


def _restrict(s: Sizes) -> Iterator[Case]:
    top_k, top_p = s.tensor(0, 0, 1, 50, s.vocabulary // 2), s.tensor(0.9, 1e-6, 1.0, 0.95, 0.999)
    warm, logits = s.tensor(0.7, 1.3, 1.0, 0.8, 0.9), 3 * s.draw(5, 3, s.vocabulary)
    logits[:, 0, :7] = logits[:, 0].amax(-1, keepdim=True)  # ties, also of the two zeros
    logits[:, 1, :9], logits[:, 1, 4:6], logits[:, 2, 50:] = 0.0, -0.0, float("-inf")
    yield Case(f"5 x 3 x {s.vocabulary}", lambda b: b.restrict(logits, warm, top_k, top_p))


# -- trees and texts -------------------------------------------------------------------------------


def _growth(s: Sizes, extend: Callable, seen: list) -> Growth:
    """Grow the tree of two sequences by random scores; equal ones are rare."""
    shape, seeds = TreeShape(*s.tree), count()
    k = shape.width

    def children(*size: int) -> tuple[Tensor, Tensor]:
        scores, tokens = (s.draw(2, *size, seed=next(seeds)).abs() for _ in range(2))
        return -scores, tokens.mul(99).long()

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
    yield Case("the tree {}/{}/{}".format(*s.tree), lambda b: b.accept(tree, chosen, s.tree[1] + 2))


def _emit(s: Sizes) -> Iterator[Case]:
    def run(backend: TorchBackend) -> list:
        """Texts that go on, stop at an id, reach their limit, have ended."""
        state = SimpleNamespace(
            tokens=owned(torch.arange(160, device=s.device).view(4, 40)), length=s.tensor(3, 4, 5, 6),
            root=s.tensor([3], [44], [85], [126]), limit=s.tensor(30, 30, 7, 30),
            done=s.tensor(0, 0, 0, 1, dtype=torch.bool),
            stop_ids=s.tensor(2, 9), out=owned(torch.zeros(4, 8, dtype=torch.int64, device=s.device)),
        )
        tokens = s.tensor([5, 6, 7], [5, 2, 7], [5, 6, 7], [5, 6, 7])
        count = backend.emit(state, tokens, s.tensor(2, 3, 3, 3))
        return [count, state.tokens, state.root, state.length, state.done, state.out]

    yield Case("4 sequences", run)


# By the name of what is left out if a case fails: see `CudaBackend.without`.
PARTS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "attend": _attend, "linear": _linear, "experts": _experts, "rank": _rank, "largest": _largest,
    "extend": _extend, "prune": _prune, "accept": _accept, "emit": _emit, "move": _move,
    "gumbel": _gumbel, "restrict": _restrict,
}
