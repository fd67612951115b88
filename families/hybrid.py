"""Targets whose layers are mostly gated delta nets: Qwen3-Next, Qwen3.5 and later. Definitions only.

A delta net (arXiv 2412.06464) keeps a state S [dk, dv] for each head. A token with key k, value v, query q,
decay a = exp(g) and step b changes the state S of its parent and reads the new one:

    S' = a S + k u^T,  u = b (v - a S^T k),  output S'^T q

A tree needs no state for each node. S is the state before a block of text, G the sum of g along a path since
then, and i is above j if it is an ancestor of j:

    u_j = b_j (v_j - exp(G_j) S^T k_j - sum over i above j of exp(G_j - G_i) (k_j . k_i) u_i)
    output_j = exp(G_j) S^T q_j + sum over i above j, and j, of exp(G_j - G_i) (q_j . k_i) u_i

Drafted text equals plain text bit for bit, because a row depends on its position and its path alone. Its path
begins at a boundary of the text (`base`), which its position gives and which lies in committed text. All sums
are in the order of the path. A cache keeps the state at one boundary, and a ring of later tokens' numbers.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import whole
from families.experts import Experts, MixtureArgs, MixtureBlock
from families.norms import ZeroCentredNorm
from model import MLP, KVCache, KVCaches, Linear, PassInputs, Transformer, rows_of

BLOCK = 16  # tokens between two boundaries of a text
MOST_LEVELS = 16  # levels of a tree below its root: a row's boundary is as many tokens before it, or more
MOST_ROWS = 96  # of a pass
RING = 256  # tokens that a cache keeps: of two passes, and of those before them since a boundary
OPEN = BLOCK + MOST_LEVELS  # more than the tokens of a text after a row's boundary
RINGS = "inputs", "mixed", "rates"  # of a cache, for every one of these tokens
WIDTH = 32  # numbers that PyTorch computes at once, at most


def base(position: Tensor) -> Tensor:
    """Return the boundary that rows at these positions begin at."""
    return ((position - MOST_LEVELS) // BLOCK * BLOCK).clamp(min=0)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single numbers to x.

    PyTorch rounds the last numbers of a tensor, those that do not fill its vectors, in another way. So rows
    are filled up.
    """
    return function(F.pad(x, (0, -x.shape[-1] % WIDTH)))[..., : x.shape[-1]]


def folded(x: Tensor) -> Tensor:
    """Return the sums of the last dimension, added in one order whatever the other dimensions are."""
    while (n := x.shape[-1]) > 1:
        x = F.pad(x, (0, n % 2))
        one, other = x.chunk(2, dim=-1)
        x = one + other
    return x[..., 0]


@dataclass(frozen=True)
class HybridArgs(MixtureArgs):
    """The shape of a target with delta nets, of nv heads, or nk of q and k, and their sizes dk and dv."""

    delta_layers: tuple[whole(0, 1), ...] = ()  # 1: a delta net, 0: gated attention
    delta_heads: whole(0, 2**16) = 0  # nv
    delta_key_heads: whole(0, 2**16) = 0  # nk
    delta_key_dim: whole(0, 2**16) = 0  # dk
    delta_value_dim: whole(0, 2**16) = 0  # dv
    delta_taps: whole(0, 64) = 0  # tokens that a short convolution reads
    rotary_dim: whole(0, 2**16) = 0  # numbers of a head that RoPE turns, of the first pairs; 0: all
    shared_expert_size: whole(0, 2**22) = 0  # inner size of the expert that all tokens use; 0: there is none
    zero_centred: Literal[True] = True  # norms multiply by 1 + weight

    def relations(self) -> list[tuple[str, bool, str]]:
        each = ("delta_layers", len(self.delta_layers) == self.num_layers, f"a list of {self.num_layers}")
        return [*super().relations(), each]

    @property
    def delta_width(self) -> int:
        """The width of q, k and v of a delta net side by side."""
        return 2 * self.delta_key_heads * self.delta_key_dim + self.delta_heads * self.delta_value_dim

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        if not self.rotary_dim:
            return super().inverse_frequencies(length)
        turning = replace(self, head_dim=self.rotary_dim, rotary_dim=0).inverse_frequencies(length)
        return F.pad(turning, (0, (self.head_dim - self.rotary_dim) // 2))  # the other pairs stand still


class SharedExperts(nn.Module):
    """A mixture of experts and one that all rows use, as much as a gate says."""

    def __init__(self, args: HybridArgs):
        super().__init__()
        self.routed = Experts(args)
        self.shared = MLP(replace(args, intermediate_size=args.shared_expert_size))
        self.gate = Linear(args.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """As `MLP.forward`."""
        return self.routed(x, residual) + rowwise(torch.sigmoid, self.gate(x)) * self.shared(x, None)


class HybridBlock(MixtureBlock):
    """What both kinds of layers have in common."""

    Norm, standard = ZeroCentredNorm, False

    def make_mlp(self, args: HybridArgs) -> nn.Module:
        return SharedExperts(args) if args.shared_expert_size else super().make_mlp(args)


class GatedBlock(HybridBlock):
    """A layer with attention whose output is multiplied by a gate: `wqkv` computes q, k, v and the gate."""

    def __init__(self, args: HybridArgs, layer: int = 0):
        super().__init__(args, layer)
        H, width = args.hidden_size, args.num_heads * args.head_dim
        self.wqkv = Linear(H, 2 * width + 2 * args.num_kv_heads * args.head_dim, bias=args.qkv_bias)

    def attend(self, cache: KVCache, qkv: Tensor, shared: PassInputs) -> Tensor:
        width = self.num_heads * self.head_dim
        attended = cache.attend(self, qkv[..., :-width].contiguous(), shared)
        return attended * rowwise(torch.sigmoid, qkv[..., -width:])


class DeltaBlock(HybridBlock):
    """A layer with a gated delta net in place of attention."""

    def __init__(self, args: HybridArgs, layer: int = 0):
        super().__init__(args, layer)
        self.key_heads, self.heads_of_values = args.delta_key_heads, args.delta_heads
        self.key_dim, self.value_dim = args.delta_key_dim, args.delta_value_dim
        values = self.heads_of_values * self.value_dim
        self.widths = args.delta_width, values, self.heads_of_values, self.heads_of_values
        del self.wqkv, self.wo, self.q_norm, self.k_norm
        self.q_norm = self.k_norm = None
        self.w_in = Linear(args.hidden_size, sum(self.widths), bias=False)
        self.w_out = Linear(values, args.hidden_size, bias=False)
        self.taps = nn.Parameter(torch.zeros(args.delta_width, args.delta_taps))
        self.log_decay = nn.Parameter(torch.zeros(self.heads_of_values))
        self.step_bias = nn.Parameter(torch.zeros(self.heads_of_values))
        self.out_scale = nn.Parameter(torch.ones(self.value_dim))
        self.eps = args.norm_eps

    wqkv = property(lambda self: self.w_in)  # the names of all layers
    wo = property(lambda self: self.w_out)

    def convolved(self, inputs: list[Tensor]) -> Tensor:
        """Return q, k and v [B, T, delta_width] of what the last tokens of each path put in, oldest first."""
        total = inputs[0].float() * self.taps[:, 0].float()
        for i, x in enumerate(inputs[1:], 1):
            total = total + x.float() * self.taps[:, i].float()
        dtype = inputs[0].dtype
        return rowwise(F.silu, total.to(dtype).float()).to(dtype)

    def rates(self, step: Tensor, decay: Tensor) -> Tensor:
        """Return g, then b, float32 [B, T, 2 nv], of the last outputs of `w_in`."""
        softplus = rowwise(F.softplus, decay.float() + self.step_bias.float())
        g = -rowwise(torch.exp, self.log_decay.float()) * softplus
        return torch.cat((g, rowwise(torch.sigmoid, step.float()).to(step.dtype).float()), -1)

    def split_mixed(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [..., nv, dk], normed, q scaled, and v [..., nv, dv], in float32."""
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.float().split((keys, keys, self.widths[1]), dim=-1)

        def heads(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (self.key_heads, self.key_dim))
            x = x / (folded(x * x) + 1e-6).sqrt()[..., None]
            return x.repeat_interleave(self.heads_of_values // self.key_heads, dim=-2)

        v = v.unflatten(-1, (self.heads_of_values, self.value_dim))
        return heads(q) * self.key_dim**-0.5, heads(k), v

    def as_columns(self, sees: Tensor, mixed: Tensor, rates: Tensor) -> Columns:
        """Return tokens by what they put into the rings."""
        return Columns(sees, *self.split_mixed(mixed), *rates.chunk(2, dim=-1))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return outputs [B, T, nv, dv], normed and gated by gate [B, T, nv*dv], as `wo` reads them."""
        x = out.to(gate.dtype).float()
        x = x / (folded(x * x) / self.value_dim + self.eps).sqrt()[..., None]
        x = (self.out_scale * x.to(gate.dtype)).flatten(2).float()
        return (x * rowwise(F.silu, gate.float())).to(gate.dtype)


class Columns(NamedTuple):
    """Tokens that rows of a pass depend on, on paths that begin at one boundary.

    sees [B, M, M]: the tokens on the path of each, itself among them; the others come before it. q, k, v: as
    `DeltaBlock.split_mixed` returns them, g and b [B, M, nv].
    """

    sees: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor

    def part(self, tokens: slice) -> Columns:
        """Return some of the tokens."""
        return Columns(self.sees[:, tokens, tokens], *(x[:, tokens] for x in self[1:]))

    def solve(self, state: Tensor, outputs_from: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return u [B, M, nv, dv], G [B, M, nv], and the outputs [B, M', nv, dv] of tokens from a number on.

        state [B, nv, dk, dv]: before the first.
        """
        total, rows = torch.zeros_like(self.g), slice(outputs_from, None)
        for i in range(total.shape[1]):
            total = total + torch.where(self.sees[..., i, None], self.g[:, i, None], 0)
        decay = rowwise(torch.exp, total)[..., None]
        u = self.b[..., None] * (self.v - decay * read(state, self.k))
        out = decay[:, rows] * read(state, self.q[:, rows])
        for i in range(u.shape[1]):
            fade = rowwise(torch.exp, total - total[:, i, None])
            below = slice(i + 1, None)
            near = self.b[:, below] * fade[:, below] * folded(self.k[:, below] * self.k[:, i, None])
            near = torch.where(self.sees[:, below, i, None], near, 0)
            u[:, below] -= near[..., None] * u[:, i, None]
            near = fade[:, rows] * folded(self.q[:, rows] * self.k[:, i, None])
            near = torch.where(self.sees[:, rows, i, None], near, 0)
            out += near[..., None] * u[:, i, None]
        return u, total, out

    def advance(self, state: Tensor) -> Tensor:
        """Return the state after the first BLOCK tokens, which are one path."""
        first = self.part(slice(BLOCK))
        first = first._replace(sees=torch.ones_like(first.sees).tril())
        u, total, _ = first.solve(state, BLOCK)
        state = rowwise(torch.exp, total[:, -1])[..., None, None] * state
        fade = rowwise(torch.exp, total[:, -1:] - total)
        for i in range(BLOCK):
            state = state + (fade[:, i, :, None] * first.k[:, i])[..., None] * u[:, i, :, None]
        return state


def read(state: Tensor, x: Tensor) -> Tensor:
    """Return S^T x [B, M, nv, dv] of x [B, M, nv, dk]."""
    return folded((state[:, None] * x[..., None]).transpose(-1, -2))


class Paths:
    """The paths of the rows of a pass, the same in every layer.

    Row 0 is the root of a tree, or the first of a chain; rows lie in consecutive slots after the committed
    tokens. tap_slots [B, T, taps]: the slots of the last tokens of each path, below 0 before the text. start
    [B]: boundaries of the states. Raises RuntimeError if one is beyond those of the rows.
    """

    def __init__(self, shared: PassInputs, taps: int, start: Tensor):
        slots, positions = shared.slots, shared.positions
        T = slots.shape[1]
        self.length, self.positions = slots[:, 0], positions
        if bool(((start > base(self.length)) & (self.length > 0)).any()):
            raise RuntimeError("a pass goes back before the state of a text: tokens must be read in order")
        self.local = shared.visible.gather(2, slots[:, None].expand(-1, T, -1))
        depth = positions - self.length[:, None]
        self.chain = bool((depth == torch.arange(T, device=depth.device)).all())
        found = []
        for back in range(taps - 1, 0, -1):
            above = self.local & (depth[:, None] == depth[..., None] - back)
            own = slots.gather(1, above.long().argmax(-1))
            found.append(torch.where(depth >= back, own, positions - back))
        self.tap_slots = torch.stack((*found, slots), -1)

    def pieces(self) -> list[slice]:
        """Return the rows that are computed together: all of a tree, those of a chain block by block."""
        count = self.positions.shape[1]
        size = BLOCK if self.chain else count
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class DeltaCache(nn.Module):
    """State of one layer [B, nv, dk, dv] at boundary `start` [B] of each text, and a ring of what tokens
    computed since: inputs and outputs of the convolution [B, ring, delta_width], g and b [B, ring, 2 nv].

    kept_...: the same at an earlier boundary, with the next `BLOCK` tokens only; see `HybridCaches.keep`.
    ops: our CPU operators (`kernels.cpu`), whose `delta` is what `_advanced` and `_outputs` define, or None.
    """

    def __init__(
        self, batch: int, ring: int, args: HybridArgs, dtype: torch.dtype, device: torch.device | str,
        ops=None,
    ):
        super().__init__()
        self.ops = ops

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            zeros = torch.zeros(batch, *shape, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

        for kept, tokens in ("", ring), ("kept_", BLOCK):
            buffer(f"{kept}state", args.delta_heads, args.delta_key_dim, args.delta_value_dim)
            buffer(f"{kept}start", dtype=torch.int64)
            buffer(f"{kept}inputs", tokens, args.delta_width, dtype=dtype)
            buffer(f"{kept}mixed", tokens, args.delta_width, dtype=dtype)
            buffer(f"{kept}rates", tokens, 2 * args.delta_heads)

    def at(self, buffer: Tensor, slots: Tensor) -> Tensor:
        """Return the entries of a ring at slots [B, M]: [B, M, width]."""
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        return buffer[rows, slots % buffer.shape[1]]

    def put(self, buffer: Tensor, slots: Tensor, values: Tensor) -> None:
        """Write entries at slots [B, M] of a ring."""
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        buffer.index_put_((rows, slots % buffer.shape[1]), values)

    def move(self, source: Tensor, target: Tensor) -> None:
        """As `KVCaches.move`."""
        for name in RINGS:
            ring = getattr(self, name)
            self.put(ring, target, self.at(ring, source))

    def keep(self, slot: int, back: bool = False) -> None:
        """Copy the state of a slot and the tokens after it to `kept_...`; back: from there."""
        start = int((self.kept_start if back else self.start)[slot])
        slots = torch.arange(start, start + BLOCK) % self.inputs.shape[1]
        for name, where in {"state": ..., "start": ..., **dict.fromkeys(RINGS, slots)}.items():
            own, kept = getattr(self, name)[slot], getattr(self, f"kept_{name}")[slot]
            if back:
                own[where] = kept
            else:
                kept.copy_(own[where])

    def attend(self, block: DeltaBlock, projected: Tensor, shared: PassInputs) -> Tensor:
        """Compute a layer's rows from outputs of `w_in` [B, T, ...] -> what `wo` reads [B, T, nv*dv]."""
        if MOST_ROWS < projected.shape[1] < self.inputs.shape[1]:  # a whole text is read from its beginning
            raise ValueError(f"a pass of {projected.shape[1]} rows over delta nets: at most {MOST_ROWS}")
        inputs, gate, step, decay = projected.split(block.widths, dim=-1)
        paths = shared.cached("paths", lambda: Paths(shared, block.taps.shape[1], self.start))
        self.put(self.inputs, shared.slots, inputs)
        last = []
        for slots in paths.tap_slots.unbind(-1):
            last.append(torch.where(slots[..., None] < 0, 0, self.at(self.inputs, slots)))
        mixed, rates = block.convolved(last), block.rates(step, decay)
        self.put(self.mixed, shared.slots, mixed)
        self.put(self.rates, shared.slots, rates)
        if self.ops is not None:
            where = paths.length, paths.positions, paths.local
            out = self.ops.delta(self.mixed, self.rates, *where, self.state, self.start)
            return block.gated(out, gate)

        state, start = self._advanced(block, self.state, self.start, paths.length)
        self.state.copy_(state)
        self.start.copy_(start)
        outputs = []
        for rows in paths.pieces():
            length = paths.length + rows.start
            state, start = self._advanced(block, state, start, length)
            sees = paths.local[:, rows, rows]
            own = mixed[:, rows], rates[:, rows]
            outputs.append(self._outputs(block, state, start, length, paths.positions[:, rows], sees, own))
        return block.gated(torch.cat(outputs, 1), gate)

    def _advanced(
        self, block: DeltaBlock, state: Tensor, start: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return state and boundary for rows after `length` [B] tokens, which the ring holds."""
        fresh = length == 0
        state, start = torch.where(fresh[:, None, None, None], 0, state), torch.where(fresh, 0, start)
        while bool((behind := start < base(length)).any()):
            slots = start[:, None] + torch.arange(BLOCK, device=start.device)
            sees = torch.ones(len(start), BLOCK, BLOCK, dtype=torch.bool, device=start.device)
            tokens = block.as_columns(sees, self.at(self.mixed, slots), self.at(self.rates, slots))
            state = torch.where(behind[:, None, None, None], tokens.advance(state), state)
            start = torch.where(behind, start + BLOCK, start)
        return state, start

    def _outputs(
        self, block: DeltaBlock, state: Tensor, start: Tensor, length: Tensor, positions: Tensor,
        local: Tensor, own: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the outputs [B, T, nv, dv] of rows after `length` tokens, whose state is at their boundary.

        local [B, T, T]: the rows that each sees. own: their q, k and v, and their rates.
        """
        B, T = positions.shape
        before = start[:, None] + torch.arange(OPEN, device=start.device)  # committed, or not there
        there = before < length[:, None]
        sees = torch.zeros(B, OPEN + T, OPEN + T, dtype=torch.bool, device=start.device)
        sees[:, :OPEN, :OPEN] = (there[:, None] & there[..., None]).tril()
        sees[:, OPEN:, :OPEN] = there[:, None]
        sees[:, OPEN:, OPEN:] = local
        mixed, rates = (torch.cat((self.at(ring, before), new), 1)
                        for ring, new in zip((self.mixed, self.rates), own))
        tokens = block.as_columns(sees, mixed, rates)
        _, _, out = tokens.solve(state, OPEN)
        later = base(positions) > start[:, None]
        if bool(later.any()):
            _, _, others = tokens.part(slice(BLOCK, None)).solve(tokens.advance(state), OPEN - BLOCK)
            out = torch.where(later[..., None, None], others, out)
        return out


DeltaBlock.Cache = DeltaCache


class HybridCaches(nn.Module):
    """The caches of all layers: of those with attention as the backend has them, of others a `DeltaCache`."""

    def __init__(self, args: HybridArgs, attention: KVCaches, deltas: nn.ModuleList):
        super().__init__()
        self.args, self.attention, self.deltas = args, attention, deltas
        kinds = iter(attention), iter(deltas)
        self.each = [next(kinds[delta]) for delta in args.delta_layers]  # by layer

    def __getitem__(self, layer: int) -> KVCache | DeltaCache:
        return self.each[layer]

    def rows(self, first: int, count: int) -> HybridCaches:
        """As `KVCaches.rows`."""
        deltas = nn.ModuleList(rows_of(cache, first, count) for cache in self.deltas)
        return HybridCaches(self.args, self.attention.rows(first, count), deltas)

    def move(self, source: Tensor, target: Tensor) -> None:
        """As `KVCaches.move`."""
        self.attention.move(source, target)
        for cache in self.deltas:
            cache.move(source, target)

    def sequence(self, slot: int, slots: int) -> list[Tensor]:
        """As `KVCaches.sequence`."""
        own = [x[slot : slot + 1] for cache in self.deltas for x in cache._buffers.values()]
        return self.attention.sequence(slot, slots) + own

    def reusable_prefix(self, slot: int, length: int) -> int:
        """As in `KVCaches`. A state beyond the next token's boundary cannot be reused."""
        boundary = int(base(torch.tensor(length - 1)))
        start, kept = (int(x[slot]) for x in (self.deltas[0].start, self.deltas[0].kept_start))
        if boundary >= start:
            return length
        return kept + BLOCK + 1 if boundary >= kept > 0 else 0

    def start_request(self, slot: int, length: int) -> None:
        """As in `KVCaches`."""
        for cache in self.deltas:
            if not length:
                cache.kept_start[slot] = 0
            elif int(base(torch.tensor(length))) < int(cache.start[slot]):
                cache.keep(slot, back=True)

    def save_prefix(self, slot: int) -> None:
        """As in `KVCaches`: the next turn of a chat continues at the end of this prompt, without the thoughts
        that followed it.
        """
        for cache in self.deltas:
            cache.keep(slot)


class Hybrid(Transformer):
    """A target with delta nets and, in some layers, gated attention."""

    Args, Layer = HybridArgs, HybridBlock
    is_recurrent = True

    def check_tree(self, shape) -> None:
        levels = shape.max_commit - 1
        if shape.nodes > MOST_ROWS or levels > MOST_LEVELS:
            raise ValueError(
                f"a tree of {shape.nodes} nodes on {levels} levels: a target with gated delta nets takes at"
                f" most {MOST_ROWS} nodes on {MOST_LEVELS} levels; draft a smaller one"
            )

    def make_layer(self, layer: int) -> HybridBlock:
        return (DeltaBlock if self.args.delta_layers[layer] else GatedBlock)(self.args, layer)

    def caches(
        self, batch: int, slots: int, device: torch.device | str | None = None, ring: int = RING
    ) -> HybridCaches:
        weight, count = self.embed.weight, sum(self.args.delta_layers)
        where = weight.dtype, device or weight.device
        args = replace(self.args, num_layers=len(self.layers) - count)  # of those with attention
        attention = self.Caches.allocate(args, batch, slots, *where, self.backend)
        ops = getattr(self.backend, "ops", None) if self.runs_on_backend else None
        deltas = nn.ModuleList(DeltaCache(batch, ring, self.args, *where, ops) for _ in range(count))
        return HybridCaches(self.args, attention, deltas)

    def causal(self, tokens: Tensor, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        B, T = tokens.shape
        at = torch.arange(T, device=tokens.device).expand(B, T)
        visible = torch.ones(B, T, T, dtype=torch.bool, device=tokens.device).tril()
        caches = self.caches(B, T, ring=T)
        return self(tokens, at, at, visible, caches, aux_layers)
