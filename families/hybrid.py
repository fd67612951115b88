"""Targets whose layers are mostly Gated DeltaNet: Qwen3-Next, Qwen3.5 and later.

Gated DeltaNet (arXiv 2412.06464) has a state S [dk, dv] per head. A token with key k, value v, query q,
decay a = exp(g) and step size b updates the state S of its parent:

    S' = a S + k u^T,  u = b (v - a S^T k),  output S'^T q

Nodes of a tree need no states. Let S be the state at a boundary, G the sum of g along a path since then, and
i above j an ancestor of j:

    u_j = b_j (v_j - exp(G_j) S^T k_j - sum over i above j of exp(G_j - G_i) (k_j . k_i) u_i)
    output_j = exp(G_j) S^T q_j + sum over i above j, and j, of exp(G_j - G_i) (q_j . k_i) u_i

It is batch-invariant: a token's result depends only on its position and its path. The path starts at a
boundary of the committed text, which the position determines (`boundary_of`). Sums run in the order of the
path. A cache stores the state at one boundary, and ring buffers of later tokens.
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
from families.mixed import MixedCaches
from families.norms import ZeroCenteredNorm, invariant, ordered_sum
from families.rope import PartialRotaryArgs, scale_pairs
from model import MLP, KVCache, KVCaches, Linear, PassInputs, Transformer

BLOCK = 16  # tokens between two boundaries
MAX_LEVELS = 16  # levels of a tree; also the minimum distance of a token from its boundary
MAX_PASS_TOKENS = 96
RING = 256  # tokens of ring buffers: two passes, and the tokens since the boundary
MAX_OPEN = BLOCK + MAX_LEVELS  # exceeds the number of committed tokens after a token's boundary
RING_BUFFERS = "inputs", "mixed", "rates"  # of a `DeltaCache`


def boundary_of(position: Tensor) -> Tensor:
    """Return the boundaries of tokens at these positions."""
    return ((position - MAX_LEVELS) // BLOCK * BLOCK).clamp(min=0)


@dataclass(frozen=True)
class HybridArgs(MixtureArgs, PartialRotaryArgs):
    """Shape of a target with Gated DeltaNet: nv value heads of size dv, nk query and key heads of size dk."""

    delta_layers: tuple[whole(0, 1), ...] = ()  # 1: a DeltaNet layer, 0: gated attention
    delta_heads: whole(0, 2**16) = 0  # nv
    delta_key_heads: whole(0, 2**16) = 0  # nk
    delta_key_dim: whole(0, 2**16) = 0  # dk
    delta_value_dim: whole(0, 2**16) = 0  # dv
    delta_taps: whole(0, 64) = 0  # tokens of the short convolution
    shared_expert_size: whole(0, 2**22) = 0  # intermediate size of the shared expert; 0: none
    zero_centred: Literal[True] = True  # norms multiply by 1 + weight

    def constraints(self) -> list[tuple[str, bool, str]]:
        each = ("delta_layers", len(self.delta_layers) == self.num_layers, f"a list of {self.num_layers}")
        return [*super().constraints(), each]

    @property
    def delta_width(self) -> int:
        """The width of q, k and v of a DeltaNet layer, concatenated."""
        return 2 * self.delta_key_heads * self.delta_key_dim + self.delta_heads * self.delta_value_dim


class SharedExperts(nn.Module):
    """A mixture of experts and a gated shared expert."""

    def __init__(self, args: HybridArgs):
        super().__init__()
        self.routed = Experts(args)
        self.shared = MLP(replace(args, intermediate_size=args.shared_expert_size))
        self.gate = Linear(args.hidden_size, 1, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """See `MLP.forward`."""
        return self.routed(x, residual) + invariant(torch.sigmoid, self.gate(x)) * self.shared(x, None)


class HybridBlock(MixtureBlock):
    """Base class of both layer types."""

    Norm, standard = ZeroCenteredNorm, False

    def make_mlp(self, args: HybridArgs) -> nn.Module:
        return SharedExperts(args) if args.shared_expert_size else super().make_mlp(args)


class GatedBlock(HybridBlock):
    """A layer with gated attention. `wqkv` computes q, k, v and the gate."""

    def __init__(self, args: HybridArgs, layer: int = 0):
        super().__init__(args, layer)
        H, width = args.hidden_size, args.num_heads * args.head_dim
        self.wqkv = Linear(H, 2 * width + 2 * args.num_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.pair_scaling = (args.rotary_dim or args.head_dim) // 2, args.pair_factor

    def layer_cos_sin(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return scale_pairs(angles, *self.pair_scaling)

    def attend(self, cache: KVCache, qkv: Tensor, shared: PassInputs) -> Tensor:
        width = self.num_heads * self.head_dim
        attended = cache.attend(self, qkv[..., :-width].contiguous(), shared)
        return attended * invariant(torch.sigmoid, qkv[..., -width:])


class PathTokens(NamedTuple):
    """Tokens on paths that start at one boundary.

    visible [B, M, M]: the path of each token, itself included. q, k, v: see `DeltaBlock.split_mixed`. g, b:
    [B, M, nv]. delta_rule: whether u is v minus what the state holds for k, or v.
    """

    visible: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor
    delta_rule = True

    def select(self, tokens: slice) -> PathTokens:
        """Return a range of the tokens."""
        return type(self)(self.visible[:, tokens, tokens], *(x[:, tokens] for x in self[1:]))

    def solve(self, state: Tensor, outputs_from: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return u [B, M, nv, dv], G [B, M, nv], and outputs [B, M', nv, dv] from token `outputs_from` on.

        state [B, nv, dk, dv]: before the first token.
        """
        total, rows = torch.zeros_like(self.g), slice(outputs_from, None)
        for i in range(total.shape[1]):
            total = total + torch.where(self.visible[..., i, None], self.g[:, i, None], 0)
        decay = invariant(torch.exp, total)[..., None]
        u = self.b[..., None] * (self.v - decay * read_state(state, self.k) if self.delta_rule else self.v)
        out = decay[:, rows] * read_state(state, self.q[:, rows])
        for i in range(u.shape[1]):
            fade = invariant(torch.exp, total - total[:, i, None])
            below = slice(i + 1, None if self.delta_rule else 0)
            near = self.b[:, below] * fade[:, below] * ordered_sum(self.k[:, below] * self.k[:, i, None])
            near = torch.where(self.visible[:, below, i, None], near, 0)
            u[:, below] -= near[..., None] * u[:, i, None]
            near = fade[:, rows] * ordered_sum(self.q[:, rows] * self.k[:, i, None])
            near = torch.where(self.visible[:, rows, i, None], near, 0)
            out += near[..., None] * u[:, i, None]
        return u, total, out

    def advance(self, state: Tensor) -> Tensor:
        """Return the state after the first BLOCK tokens, which form one path."""
        first = self.select(slice(BLOCK))
        first = first._replace(visible=torch.ones_like(first.visible).tril())
        u, total, _ = first.solve(state, BLOCK)
        state = invariant(torch.exp, total[:, -1])[..., None, None] * state
        fade = invariant(torch.exp, total[:, -1:] - total)
        for i in range(BLOCK):
            state = state + (fade[:, i, :, None] * first.k[:, i])[..., None] * u[:, i, :, None]
        return state


def read_state(state: Tensor, x: Tensor) -> Tensor:
    """Return S^T x [B, M, nv, dv] of x [B, M, nv, dk]."""
    return ordered_sum((state[:, None] * x[..., None]).transpose(-1, -2))


class DeltaBlock(HybridBlock):
    """A layer with Gated DeltaNet in place of attention. Tokens: the class of `path_tokens`."""

    Tokens = PathTokens

    def __init__(self, args: HybridArgs, layer: int = 0):
        super().__init__(args, layer)
        self.key_heads, self.value_heads = args.delta_key_heads, args.delta_heads
        self.key_dim, self.value_dim = args.delta_key_dim, args.delta_value_dim
        values = self.value_heads * self.value_dim
        self.widths = args.delta_width, values, self.value_heads, self.value_heads
        del self.wqkv, self.wo, self.q_norm, self.k_norm
        self.q_norm = self.k_norm = None
        self.w_in = Linear(args.hidden_size, sum(self.widths), bias=False)
        self.w_out = Linear(values, args.hidden_size, bias=False)
        self.taps = nn.Parameter(torch.zeros(args.delta_width, args.delta_taps))
        self.log_decay = nn.Parameter(torch.zeros(self.value_heads))
        self.step_bias = nn.Parameter(torch.zeros(self.value_heads))
        self.conv_bias = self.skip = None
        self.out_scale = nn.Parameter(torch.ones(self.value_dim))
        self.eps = args.norm_eps

    wqkv = property(lambda self: self.w_in)  # backends use the names of attention layers
    wo = property(lambda self: self.w_out)

    def convolve(self, inputs: list[Tensor]) -> Tensor:
        """Convolve the inputs of each path's last tokens, oldest first -> q, k, v [B, T, delta_width]."""
        total = inputs[0].float() * self.taps[:, 0].float()
        for i, x in enumerate(inputs[1:], 1):
            total = total + x.float() * self.taps[:, i].float()
        if self.conv_bias is not None:
            total = total + self.conv_bias.float()
        dtype = inputs[0].dtype
        return invariant(F.silu, total.to(dtype).float()).to(dtype)

    def rates(self, step: Tensor, decay: Tensor) -> Tensor:
        """Return g and b, float32 [B, T, 2 nv], of the last outputs of `w_in`."""
        softplus = invariant(F.softplus, decay.float() + self.step_bias.float())
        g = -invariant(torch.exp, self.log_decay.float()) * softplus
        return torch.cat((g, invariant(torch.sigmoid, step.float()).to(step.dtype).float()), -1)

    def split_mixed(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normed q and k [..., nv, dk], q scaled, and v [..., nv, dv], in float32."""
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.float().split((keys, keys, self.widths[1]), dim=-1)

        def heads(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (self.key_heads, self.key_dim))
            x = x / (ordered_sum(x * x) + 1e-6).sqrt()[..., None]
            return x.repeat_interleave(self.value_heads // self.key_heads, dim=-2)

        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        return heads(q) * self.key_dim**-0.5, heads(k), v

    def path_tokens(self, visible: Tensor, mixed: Tensor, rates: Tensor) -> PathTokens:
        """Return the tokens of ring buffer entries."""
        return self.Tokens(visible, *self.split_mixed(mixed), *rates.chunk(2, dim=-1))

    def gate_output(self, out: Tensor, gate: Tensor) -> Tensor:
        """Norm outputs [B, T, nv, dv] and multiply them by the gate [B, T, nv*dv] -> the input of `wo`."""
        x = out.to(gate.dtype).float()
        x = x / (ordered_sum(x * x) / self.value_dim + self.eps).sqrt()[..., None]
        x = (self.out_scale * x.to(gate.dtype)).flatten(2).float()
        return (x * invariant(F.silu, gate.float())).to(gate.dtype)


# See the regions of `model.py`.
@torch.compiler.nested_compile_region
def _gate_output(block: DeltaBlock, out: Tensor, projected: Tensor) -> Tensor:
    return block.gate_output(out, projected.split(block.widths, dim=-1)[1])


class Paths:
    """The paths of the tokens of a pass, shared by all layers.

    Token 0 is the root of a tree, or the first of a chain. Tokens are in consecutive slots after the
    committed ones. tap_slots [B, T, taps]: slots of the last tokens of each path; negative before the text.
    start [B]: boundaries of the states. Raises RuntimeError if a state is beyond the boundary of a token.
    """

    def __init__(self, shared: PassInputs, taps: int, start: Tensor):
        slots, positions = shared.slots, shared.positions
        T = slots.shape[1]
        self.slots, self.length, self.positions = slots, slots[:, 0], positions
        if not start.is_cuda and bool(((start > boundary_of(self.length)) & (self.length > 0)).any()):
            raise RuntimeError("a pass starts before the state of its sequence: tokens must be read in order")
        if isinstance(shared.visible, Tensor):
            self.local = shared.visible.gather(2, slots[:, None].expand(-1, T, -1))
        else:
            self.local = shared.visible.local[..., -T:]
        self.depth = depth = positions - self.length[:, None]
        tap_slots = []
        for back in range(taps - 1, 0, -1):
            above = self.local & (depth[:, None] == depth[..., None] - back)
            own = slots.gather(1, above.long().argmax(-1))
            tap_slots.append(torch.where(depth >= back, own, positions - back))
        self.tap_slots = torch.stack((*tap_slots, slots), -1)

    def chunks(self) -> list[slice]:
        """Return the ranges of tokens that are computed together: a whole tree, or blocks of a chain."""
        count = self.positions.shape[1]
        is_chain = bool((self.depth == torch.arange(count, device=self.depth.device)).all())
        size = BLOCK if is_chain else count
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class DeltaCache(nn.Module):
    """The state of one layer [B, nv, dk, dv] at boundaries `start` [B], and ring buffers of later tokens:
    inputs and outputs of the convolution [B, ring, delta_width], g and b [B, ring, 2 nv].

    snapshot_...: the same at an earlier boundary, with the next BLOCK tokens; see `DeltaCaches.save_prefix`.
    kernel: a backend's `outputs`, called with this cache and the arguments, or None.
    """

    def __init__(self, buffers: dict[str, Tensor], kernel: Callable | None):
        super().__init__()
        self.kernel = kernel
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def gather(self, buffer: Tensor, slots: Tensor) -> Tensor:
        """Return the entries of a ring buffer at slots [B, M]: [B, M, width]."""
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        return buffer[rows, slots % buffer.shape[1]]

    def scatter(self, buffer: Tensor, slots: Tensor, values: Tensor) -> None:
        """Write entries of a ring buffer at slots [B, M]."""
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        buffer.index_put_((rows, slots % buffer.shape[1]), values)

    def snapshot(self, slot: int, restore: bool = False) -> None:
        """Save the state of a batch slot and the next BLOCK tokens to `snapshot_...`, or restore them."""
        start = int((self.snapshot_start if restore else self.start)[slot])
        slots = torch.arange(start, start + BLOCK) % self.inputs.shape[1]
        for name, where in {"state": ..., "start": ..., **dict.fromkeys(RING_BUFFERS, slots)}.items():
            own, saved = getattr(self, name)[slot], getattr(self, f"snapshot_{name}")[slot]
            if restore:
                own[where] = saved
            else:
                saved.copy_(own[where])

    def randomize(self, length: Tensor, generator: torch.Generator) -> None:
        """Fill states and ring buffers for sequences of length [B], each state one block behind."""
        for name in ("state", *RING_BUFFERS):
            getattr(self, name).normal_(generator=generator)
        g, b = self.rates.chunk(2, dim=-1)
        g.copy_(-0.1 * g.abs())
        b.sigmoid_()
        self.start.copy_((boundary_of(length) - BLOCK).clamp(min=0))
        self.state.mul_((self.start > 0)[:, None, None, None])

    def attend(self, block: DeltaBlock, projected: Tensor, shared: PassInputs) -> Tensor:
        """Outputs of `w_in` [B, T, ...] -> the input of `wo` [B, T, nv*dv]."""
        if MAX_PASS_TOKENS < projected.shape[1] < self.inputs.shape[1]:  # GPTQ's ring holds all tokens
            raise ValueError(f"a pass of {projected.shape[1]} tokens: at most {MAX_PASS_TOKENS} (DeltaNet)")
        paths = shared.cached("paths", lambda: Paths(shared, block.taps.shape[1], self.start))
        out = (self.kernel or DeltaCache.outputs)(self, block, projected, paths)
        if block.skip is not None:
            out = block.add_skip(out, self.gather(self.mixed, paths.slots))
        return _gate_output(block, out, projected)

    def write(self, block: DeltaBlock, projected: Tensor, paths: Paths) -> None:
        """Write the tokens of a pass to the ring buffers. projected [B, T, ...]: outputs of `w_in`."""
        inputs, _, step, decay = projected.split(block.widths, dim=-1)
        self.scatter(self.inputs, paths.slots, inputs)
        last = []
        for slots in paths.tap_slots.unbind(-1):
            last.append(torch.where(slots[..., None] < 0, 0, self.gather(self.inputs, slots)))
        self.scatter(self.mixed, paths.slots, block.convolve(last))
        self.scatter(self.rates, paths.slots, block.rates(step, decay))

    def outputs(self, block: DeltaBlock, projected: Tensor, paths: Paths) -> Tensor:
        """Write the tokens of a pass, advance the states, and return the outputs [B, T, nv, dv]."""
        self.write(block, projected, paths)
        state, start = self._advance(block, self.state, self.start, paths.length)
        self.state.copy_(state)
        self.start.copy_(start)
        outputs = []
        for rows in paths.chunks():
            length = paths.length + rows.start
            state, start = self._advance(block, state, start, length)
            where = length, paths.positions[:, rows], paths.local[:, rows, rows]
            outputs.append(self._outputs(block, state, start, *where))
        return torch.cat(outputs, 1)

    def _advance(
        self, block: DeltaBlock, state: Tensor, start: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advance states to the boundaries of tokens after `length` [B]. Returns states and boundaries."""
        empty = length == 0
        state, start = torch.where(empty[:, None, None, None], 0, state), torch.where(empty, 0, start)
        while bool((behind := start < boundary_of(length)).any()):
            slots = start[:, None] + torch.arange(BLOCK, device=start.device)
            visible = torch.ones(len(start), BLOCK, BLOCK, dtype=torch.bool, device=start.device)
            entries = (self.gather(ring, slots) for ring in (self.mixed, self.rates))
            tokens = block.path_tokens(visible, *entries)
            state = torch.where(behind[:, None, None, None], tokens.advance(state), state)
            start = torch.where(behind, start + BLOCK, start)
        return state, start

    def _outputs(
        self, block: DeltaBlock, state: Tensor, start: Tensor, length: Tensor, positions: Tensor,
        local: Tensor,
    ) -> Tensor:
        """Return the outputs [B, T, nv, dv] of tokens after `length`. state: at their boundary.

        local [B, T, T]: the path of each token.
        """
        B, T = positions.shape
        before = start[:, None] + torch.arange(MAX_OPEN, device=start.device)
        committed = before < length[:, None]
        visible = torch.zeros(B, MAX_OPEN + T, MAX_OPEN + T, dtype=torch.bool, device=start.device)
        visible[:, :MAX_OPEN, :MAX_OPEN] = (committed[:, None] & committed[..., None]).tril()
        visible[:, MAX_OPEN:, :MAX_OPEN] = committed[:, None]
        visible[:, MAX_OPEN:, MAX_OPEN:] = local
        slots = torch.cat((before, length[:, None] + torch.arange(T, device=start.device)), 1)
        tokens = block.path_tokens(visible, *(self.gather(ring, slots) for ring in (self.mixed, self.rates)))
        _, _, out = tokens.solve(state, MAX_OPEN)
        later = boundary_of(positions) > start[:, None]
        if bool(later.any()):
            _, _, others = tokens.select(slice(BLOCK, None)).solve(tokens.advance(state), MAX_OPEN - BLOCK)
            out = torch.where(later[..., None, None], others, out)
        return out


class DeltaCaches(KVCaches):
    """The caches of all DeltaNet layers: views of buffers [layers, B, ...], by name."""

    def __init__(self, buffers: dict[str, Tensor], kernel: Callable | None):
        self.stacked, self.kernel = buffers, kernel
        count = len(buffers["state"])
        super().__init__(DeltaCache({n: x[i] for n, x in buffers.items()}, kernel) for i in range(count))

    @classmethod
    def of_layers(
        cls, layers: int, batch: int, args: HybridArgs, dtype: torch.dtype, device: torch.device | str,
        kernel: Callable | None = None, ring: int = RING,
    ) -> DeltaCaches:
        """Allocate the caches of this many layers. ring: tokens of the ring buffers."""
        buffers = {}

        def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            buffers[name] = torch.zeros(layers, batch, *shape, dtype=dtype, device=device)

        for prefix, tokens in ("", ring), ("snapshot_", BLOCK):
            buffer(f"{prefix}state", args.delta_heads, args.delta_key_dim, args.delta_value_dim)
            buffer(f"{prefix}start", dtype=torch.int64)
            buffer(f"{prefix}inputs", tokens, args.delta_width, dtype=dtype)
            buffer(f"{prefix}mixed", tokens, args.delta_width, dtype=dtype)
            buffer(f"{prefix}rates", tokens, 2 * args.delta_heads)
        return cls(buffers, kernel)

    def rows(self, first: int, count: int) -> DeltaCaches:
        return DeltaCaches({n: x.narrow(1, first, count) for n, x in self.stacked.items()}, self.kernel)

    def move(self, source: Tensor, target: Tensor) -> None:
        b = torch.arange(len(source), device=source.device)[:, None]
        for ring in map(self.stacked.__getitem__, RING_BUFFERS):
            ring[:, b, target % ring.shape[2]] = ring[:, b, source % ring.shape[2]]

    def sequence(self, slot: int, slots: int) -> list[Tensor]:
        return [x[slot : slot + 1] for x in self.buffers()]

    def reusable_prefix(self, slot: int, length: int) -> int:
        """See `KVCaches.reusable_prefix`. A state beyond the next token's boundary cannot be reused."""
        boundary = int(boundary_of(torch.tensor(length - 1)))
        start, saved = (int(x[slot]) for x in (self[0].start, self[0].snapshot_start))
        if boundary >= start:
            return length
        return saved + BLOCK + 1 if boundary >= saved > 0 else 0

    def start_request(self, slot: int, length: int) -> None:
        """See `KVCaches.start_request`."""
        for cache in self:
            if not length:
                cache.snapshot_start[slot] = 0
            elif int(boundary_of(torch.tensor(length))) < int(cache.start[slot]):
                cache.snapshot(slot, restore=True)

    def save_prefix(self, slot: int) -> None:
        """See `KVCaches.save_prefix`. Chat templates drop reasoning, so the next prompt extends this one."""
        for cache in self:
            cache.snapshot(slot)


class Hybrid(Transformer):
    """A target with DeltaNet layers and, in some layers, gated attention."""

    Args, Layer = HybridArgs, HybridBlock
    is_recurrent = True
    can_compile = property(lambda self: self.embed.device.type == "cuda")  # kernels advance the states

    def check_tree(self, shape) -> None:
        levels = shape.max_commit - 1
        if shape.nodes > MAX_PASS_TOKENS or levels > MAX_LEVELS:
            raise ValueError(
                f"a tree of {shape.nodes} nodes on {levels} levels: a target with Gated DeltaNet takes at"
                f" most {MAX_PASS_TOKENS} nodes on {MAX_LEVELS} levels; choose a smaller one"
            )

    def make_layer(self, layer: int) -> HybridBlock:
        return (DeltaBlock if self.args.delta_layers[layer] else GatedBlock)(self.args, layer)

    def caches(
        self, batch: int, slots: int, device: torch.device | str | None = None, ring: int = RING
    ) -> MixedCaches:
        embed, layers = self.embed, self.args.delta_layers
        where = embed.dtype, device or embed.device
        args = replace(self.args, num_layers=layers.count(0))  # attention layers
        attention = self.Caches.allocate(args, batch, slots, *where, self.backend)
        kernel = self.backend.delta if self.runs_on_backend else None
        deltas = DeltaCaches.of_layers(sum(layers), batch, self.args, *where, kernel, ring)
        locations = [(is_delta, layers[:i].count(is_delta)) for i, is_delta in enumerate(layers)]
        return MixedCaches((attention, deltas), locations)
