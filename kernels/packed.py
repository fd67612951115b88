"""Models on `kernels.cpu.CpuStep`: the same modules, their weights laid out for its operators.

`pack_models` puts models there, in place. Packed modules are for decoding only: they have no gradient and no
`weight`. Each has the backend whose operators (`ops`, see csrc/operators.cpp) it calls.

Linear layers, MLPs and norms are replaced by packed modules in their parents. A block, a target or an EAGLE-3
head stays, and gets an object in its attribute `fused` that computes its whole pass in one operator.
"""
from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor

from head import Eagle3Head
from kernels.quantized import FOUR_BITS, MXFP4, Quantized
from model import (
    MLP,
    Block,
    KVCache,
    KVCaches,
    ModelArgs,
    Pass,
    RMSNorm,
    TargetBlock,
    Transformer,
    lazy_zeros,
)
from tree import Tree

NO_COSTS = 0.0, None, None  # of trees that are not limited, see `engine.scheduler.Choice`
SAME, FLOAT32 = range(2)  # modes of `ops.linear`
GATES = {"silu": 2, "gelu_tanh": 3, "clamped_swiglu": 4}  # the others, by the activation of gates


# -- caches ------------------------------------------------------------------------------------


class CpuCache(KVCache):
    """`KVCache` whose attention is one operator, which reads the mask directly. backend: see
    `CpuCaches.of`."""

    def attend(self, block: Block, qkv: Tensor, shared: Pass) -> Tensor:
        ops = self.backend.ops
        angles = block.layer_angles(shared.angles(partial(_angles, ops)))
        caches = self.k, self.v, shared.slots, shared.visible
        return ops.attend(qkv, *angles, *block.head_norms, *caches, block.window, block.sinks)


class CpuCaches(KVCaches):
    """`KVCaches` for the operators."""

    Layer = CpuCache

    @classmethod
    def of(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> CpuCaches:
        return super().of(args, batch, slots, dtype, device, backend)._ready(args.head_dim, backend)

    def _ready(self, head_dim: int, backend) -> CpuCaches:
        self.head_dim, self.backend = head_dim, backend
        self._network: tuple = None, None  # a model, and what is made of it: see `network`
        for cache in self:
            cache.backend = backend
        return self

    def rows(self, first: int, count: int) -> CpuCaches:
        return super().rows(first, count)._ready(self.head_dim, self.backend)

    @property
    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """The keys and the values of every layer."""
        return [cache.k for cache in self], [cache.v for cache in self]

    @cached_property
    def places(self) -> Tensor:
        """The places of these, as csrc/operators.cpp: places. They keep their place."""
        return self.backend.ops.places(*self.lists)

    def network(self, model: Transformer | Eagle3Head) -> tuple:
        """Return what operators take of a model for a pass over these caches, as csrc/operators.cpp: Network.
        It is made once.
        """
        if self._network[0] is not model:
            args = model.args
            stack = self.backend.ops.stack(*model.fused.weights, *self.lists, args.norm_eps)
            of = model.embed.weight, model.inv_freq.float(), args.rope_factor, stack, args.norm_eps
            self._network = model, of
        return self._network[1]

    def move(self, source: Tensor, target: Tensor) -> None:
        self.backend.ops.move(self.places, self.head_dim, source, target)


class ByteCache(CpuCache):
    """Keys and values in int8: each head of a slot in steps of its largest / 127, see csrc/in_bytes.h.

    k, v: [B, blocks of slots, nkv, bytes of a block], heads before blocks in memory.
    """

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device | str):
        nn.Module.__init__(self)
        for name, shape in zip(("k", "v"), shapes):
            buffer = lazy_zeros(shape, torch.uint8, device).transpose(1, 2)
            self.register_buffer(name, buffer, persistent=False)


class ByteCaches(CpuCaches):
    """`CpuCaches` in int8."""

    @classmethod
    def of(cls, args, batch, slots, dtype, device, backend) -> ByteCaches:
        of_block, *sizes = backend.ops.byte_blocks(args.head_dim)
        shapes = [(batch, args.num_kv_heads, -(-slots // of_block), size) for size in sizes]
        return cls(ByteCache(shapes, device) for _ in range(args.num_layers))._ready(args.head_dim, backend)

    def entries(self, slots: int) -> int:
        return -(-slots // self.backend.ops.byte_blocks(self.head_dim)[0])


# -- modules -----------------------------------------------------------------------------------


class Packed(nn.Module):
    """A weight [N, K], or those of all experts [E, N, K], packed for x of this dtype, with scales and bias.

    weight: a tensor, or a module that has it. activation: if any, the weight is gate and up, one above the
    other, and activation(gate) * up comes out.
    """

    def __init__(
        self, backend, weight: nn.Module | Tensor, bias: Tensor | None, dtype: torch.dtype,
        activation: str | None = None,
    ):
        super().__init__()
        self.backend, gated, numbers = backend, activation is not None, getattr(weight, "weight", weight)
        self.columns, self.mode = numbers.shape[-2] // (2 if gated else 1), GATES.get(activation, SAME)
        quantised = isinstance(weight, Quantized)
        mode = weight.mode if quantised else None
        self.packed = _constant(pack(backend, numbers.detach(), mode, dtype, gated))
        self.scale = _constant(pack_scale(backend, weight.scale, gated)) if quantised else None
        self.bias = None
        if bias is not None:
            self.bias = _constant(pack_scale(backend, bias.detach().float()[..., None], gated))

    @property
    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The tensors that operators take."""
        return self.packed, self.scale, self.bias


class PackedLinear(Packed):
    """A `Linear`, a `QuantizedLinear` or a tied embedding; see `Packed`."""

    def __init__(self, backend, linear: nn.Module, dtype: torch.dtype, activation: str | None = None):
        bias = None if isinstance(linear, nn.Embedding) else linear.bias
        super().__init__(backend, linear, bias, dtype, activation)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype; bias and `residual` [..., N] are added before the only
        rounding."""
        return self.backend.ops.linear(x, *self.operands, residual, self.columns, self.mode)

    def logits(self, x: Tensor) -> Tensor:
        """Return the same in float32: nothing is rounded to 16 bits after the sums."""
        return self.backend.ops.linear(x, *self.operands, None, self.columns, FLOAT32)


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class PackedMLP(nn.Module):
    """`MLP`, the activation computed where gate and up are."""

    def __init__(self, backend, mlp: MLP, dtype: torch.dtype):
        super().__init__()
        self.w_gate_up = PackedLinear(backend, mlp.w_gate_up, dtype, mlp.activation)
        self.w_down = PackedLinear(backend, mlp.w_down, dtype)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.w_down(self.w_gate_up(x), residual)


class PackedExperts(nn.Module):
    """`Experts`, those that rows chose read once."""

    def __init__(self, backend, experts: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.backend = backend
        self.router = PackedLinear(backend, experts.router, dtype)
        activation = experts.activation
        self.w_gate_up = Packed(backend, experts.w_gate_up, experts.gate_up_bias, dtype, activation)
        experts.w_gate_up = None  # its memory is free before the next is packed
        self.w_down = Packed(backend, experts.w_down, experts.down_bias, dtype)
        # As csrc/operators.cpp: mixture_of reads it.
        self.bits = self.router.columns << 24 | experts.used << 40 | int(experts.renormalise) << 56

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """As `MLP.forward`."""
        residual = torch.zeros_like(x) if residual is None else residual
        weights = [w for part in (self.router, self.w_gate_up, self.w_down) for w in part.operands]
        return self.backend.ops.experts(x, residual, *weights, self.bits, self.w_gate_up.mode)


class PackedNorm(nn.Module):
    """`RMSNorm` as an operator, its factors in float32."""

    def __init__(self, backend, norm: RMSNorm):
        super().__init__()
        self.backend, self.weight, self.eps = backend, norm.weight, norm.eps
        self.register_buffer("scale", norm.scale.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.ops.rms_norm(x, self.scale, self.eps)


def _angles(ops, args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `model.rope_table` as one operator."""
    return ops.angles(positions, inv_freq.float(), args.rope_factor)


# -- whole passes ------------------------------------------------------------------------------


class FusedBlock:
    """The pass of one layer as one operator. weights: see `_weights`."""

    def __init__(self, block: Block):
        self.weights = _weights(block)

    def __call__(
        self, block: Block, x: Tensor, cache: KVCache, shared: Pass, inputs: Tensor | None = None
    ) -> Tensor:
        """`Block.forward` of this block."""
        read = None if isinstance(block, TargetBlock) else x if inputs is None else inputs
        ops, eps = block.wqkv.backend.ops, block.mlp_norm.eps
        stack = ops.stack(*self.weights, [cache.k], [cache.v], eps)
        angles = block.layer_angles(shared.angles(partial(_angles, ops)))
        x, _ = ops.layers(x, *angles, stack, shared.slots, shared.visible, eps, (), read)
        return x


class FusedTransformer:
    """The pass of a whole target as one operator. scoring: see `_scoring`."""

    def __init__(self, target: Transformer, scoring: tuple):
        self.weights, self.scoring = _joined(target.layers), scoring
        self.embedding_scale = target.args.embedding_scale(target.embed.weight.dtype)

    def __call__(
        self, target: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor,
        caches: CpuCaches, aux_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`Transformer.forward` of this target."""
        given = tokens, positions, slots, visible, self.embedding_scale, aux_layers
        x, features = target.backend.ops.target(*given, *caches.network(target))
        return x, features if aux_layers else None

    def verify(
        self, target: Transformer, drafted: Tree, length: Tensor, slots: int, caches: CpuCaches,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """`Step.verify` in one operator. slots: the number of live slots."""
        nodes = drafted.tokens, drafted.depth, drafted.ancestors, length, slots
        given = self.embedding_scale, aux_layers, *self.scoring
        logits, features = target.backend.ops.verify(*nodes, *given, *caches.network(target))
        return logits, features if aux_layers else None


class FusedEagle3Head:
    """The pass of all layers of an EAGLE-3 head as one operator.

    grows: `draft` grows its whole tree in one operator, scored by `scoring`.
    """

    def __init__(self, head: Eagle3Head, scoring: tuple | None):
        self.weights, self.scoring = _joined([head.layer, *head.more_layers]), scoring
        self.grows = scoring is not None and head.feeds_residual

    def __call__(
        self, head: Eagle3Head, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor,
        visible: Tensor, caches: CpuCaches,
    ) -> Tensor:
        """`Eagle3Head.run_layers` of this head."""
        return head.backend.ops.head(tokens, feature, positions, slots, visible, *self._network(head, caches))

    def _network(self, head: Eagle3Head, caches: CpuCaches) -> tuple:
        """Return what operators take of this head for a pass, as csrc/operators.cpp: Head."""
        return head.layer.embed_norm.scale, head.layer.feature_norm.scale, *caches.network(head)

    def draft(self, drafter, state, slots: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        """Return the fields of the tree that `Step.draft` grows with this head, and its levels."""
        head, shape = drafter.network, drafter.shape
        ops, fc = head.backend.ops, head.fc
        sizes = slots.shape[0], shape.nodes, shape.depth, shape.width
        growing = (
            state.root, state.length, *sizes, *(state.costs or NO_COSTS), *self.scoring,
            noise if drafter.coupled else None, head.draft_ids, *self._network(head, drafter.caches),
        )
        if getattr(head, "fc_norms", None) or not isinstance(fc, PackedLinear):
            return ops.grow(drafter.catch_up(head.backend, state, slots), *growing)
        unread = drafter.own_features(state.features), state.max_commit, *fc.operands, fc.columns
        return ops.draft(state.tokens, state.n_new, *unread, *growing)


# -- packing models ----------------------------------------------------------------------------


def pack_models(backend, *models: nn.Module) -> bool:
    """Put models on a `CpuStep`, see `CpuStep.prepare`."""
    done: WeakKeyDictionary[nn.Module, PackedLinear] = WeakKeyDictionary()  # what several models share

    def packed(module: nn.Module, dtype: torch.dtype) -> PackedLinear:
        if module not in done:
            done[module] = PackedLinear(backend, module, dtype)
        return done[module]

    def pack_children(parent: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the children that the operators take. Each is freed before the next is packed."""
        for name in [name for name, _ in parent.named_children()]:
            child = parent.get_submodule(name)
            if isinstance(child, RMSNorm) and takes_rows(2, dtype, device):
                setattr(parent, name, PackedNorm(backend, child))
            elif isinstance(child, MLP) and all(takes_module(w, dtype, device) for w in child.children()):
                setattr(parent, name, PackedMLP(backend, child, dtype))
            elif is_mixture(child) and takes_module(child, dtype, device):
                setattr(parent, name, PackedExperts(backend, child, dtype))
            elif (name == "lm_head" or not isinstance(child, nn.Embedding)) and takes_module(
                child, dtype, device
            ):
                setattr(parent, name, packed(child, dtype))
            elif not is_mixture(child):
                pack_children(child, dtype, device)

    complete = True
    for model in models:
        dtype, device = model.embed.weight.dtype, model.embed.weight.device
        if model.lm_head is None and takes_module(model.embed, dtype, device):
            model.lm_head = packed(model.embed, dtype)  # tied: the table stays, for reading embeddings
        pack_children(model, dtype, device)
        attends = takes_rows(model.args.head_dim, dtype, device)
        if attends:
            model.Caches = backend.caches["auto"]
        for block in model.modules():
            if isinstance(block, Block) and attends and block.sinks is not None:
                block.sinks = _constant(block.sinks.detach().float())
            if isinstance(block, Block) and block.standard and attends and _is_packed(block):
                block.fused = FusedBlock(block)
        if isinstance(model, Transformer):
            # With several ranks a layer's sums are theirs: an operator for each part.
            model.whole = attends and all(_is_packed(layer, summed=True) for layer in model.layers)
            complete = complete and model.whole
            scoring = _scoring(model)
            if model.whole and scoring is not None and all(layer.fused for layer in model.layers):
                model.fused = FusedTransformer(model, scoring)
        if isinstance(model, Eagle3Head) and _fits_operator(model):
            model.fused = FusedEagle3Head(model, _scoring(model))
    return complete


def _fits_operator(head: Eagle3Head) -> bool:
    """Return whether `ops.head` computes this variant, with these weights."""
    first = head.layer
    plain = isinstance(head.embed, nn.Embedding) and not getattr(first, "norm_before_residual", False)
    normed = all(isinstance(norm, PackedNorm) for norm in (first.embed_norm, first.feature_norm))
    return plain and normed and all(layer.fused for layer in (first, *head.more_layers))


def _scoring(model: Transformer | Eagle3Head) -> tuple | None:
    """Return what operators take to score a model's rows, as csrc/operators.cpp: Scoring; None: it cannot."""
    norm, head = model.norm, model.lm_head
    packed = isinstance(norm, PackedNorm) and isinstance(head, PackedLinear)
    return (norm.scale, *head.operands, head.columns) if packed else None


def _weights(layer: Block) -> tuple[list[Tensor], list[int]]:
    """Return what `ops.layers` reads of a layer, collected once: asking modules takes as long as an operator.

    The first list has its weights, in the order of csrc/operators.cpp: Part. The second has a bit for each
    that it has, its window, and the mode of its gate.
    """
    gate_up, down = layer.mlp.w_gate_up, layer.mlp.w_down
    attn_norm, wo_norm, mlp_norm, down_norm = (
        getattr(getattr(layer, name, None), "scale", None)
        for name in ("attn_norm", "wo_norm", "mlp_norm", "mlp_out_norm")
    )
    weights = [attn_norm, *layer.wqkv.operands, *layer.head_norms[:2], layer.sinks, *layer.wo.operands]
    weights += [wo_norm, mlp_norm, *gate_up.operands, *down.operands, down_norm]
    has = 0
    if isinstance(layer.mlp, PackedExperts):
        weights, has = [*weights, *layer.mlp.router.operands], layer.mlp.bits
    has |= sum(1 << i for i, w in enumerate(weights) if w is not None)
    return [w for w in weights if w is not None], [has, layer.window, gate_up.mode]


def _joined(layers: Iterable[Block]) -> tuple[list[Tensor], list[int]]:
    """Return the weights of fused layers, one layer after the other."""
    each = [layer.fused.weights for layer in layers]
    return tuple([x for one in lists for x in one] for lists in zip(*each))


def is_mixture(module: nn.Module | Tensor) -> bool:
    """Return whether a module is a `families.experts.Experts`, which is not imported for other models."""
    return getattr(module, "is_mixture", False)


def takes_rows(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the operators compute rows of this size: float32, and bfloat16 in even numbers."""
    return device.type == "cpu" and (dtype == torch.float32 or (dtype == torch.bfloat16 and columns % 2 == 0))


def takes_module(module: nn.Module | Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a linear layer, a table, a stack of experts or a whole mixture can be packed."""
    if is_mixture(module):
        parts = module.router, module.w_gate_up, module.w_down
        return all(takes_module(part, dtype, device) for part in parts)
    if isinstance(module, Quantized):
        words = module.mode != "w8a8" or module.inputs % 4 == 0
        return module.mode != "fp8" and words and takes_rows(module.inputs, dtype, device)
    weight = module.weight if isinstance(module, nn.Linear | nn.Embedding) else module
    fits = isinstance(weight, Tensor) and weight.dtype == dtype
    return fits and takes_rows(weight.shape[-1], dtype, device)


def _is_packed(layer: Block, summed: bool = False) -> bool:
    """Return whether all parts of a layer are packed. summed: apart from its sums over ranks."""
    wo, mlp = (getattr(x, "layer", x) if summed else x for x in (layer.wo, layer.mlp))  # `tp.Summed.layer`
    linear = isinstance(layer.wqkv, PackedLinear) and isinstance(wo, PackedLinear)
    norms = [layer.mlp_norm, *([layer.attn_norm] if isinstance(layer, TargetBlock) else [])]
    normed = all(isinstance(norm, PackedNorm) for norm in norms)
    kinds = PackedMLP | PackedExperts | PackedLinear
    feeds = (mlp,) if isinstance(mlp, kinds) else mlp.children()  # the parts of shared and routed experts
    return linear and all(isinstance(x, kinds) for x in feeds) and normed


# -- packing weights ---------------------------------------------------------------------------


def pack(backend, weight: Tensor, mode: str | None, dtype: torch.dtype, gated: bool = False) -> Tensor:
    """Lay a weight [N, K] out for x of this dtype -> [blocks, K/w, c, w]; rows of a block beyond N are zero.
    Weights of experts [E, N, K] follow each other.

    c output columns lie side by side, so that a block is read front to back, once per pass, and w inputs of
    each. gated: half a block's columns are of gate, half of up. mode: of quantised weights, as a
    `QuantizedLinear` stores them; None: the others, whose w inputs fill 4 bytes. Bytes of 4-bit modes
    (int4, mxfp4: [blocks, K/w, c/2 * w] uint8, w4a8: [blocks, K/w, c/2, w]) hold two values: the low bits are
    of a column of the block's first half. In w8a8 some instruction sets multiply values without a sign: 128
    is added for those.
    """
    layout = backend.layout
    words = {
        None: 4 // dtype.itemsize, "w8a8": layout.bytes_per_word, "w4a8": layout.nibbles_per_word
    }.get(mode, layout.bf16_per_word if dtype == torch.bfloat16 else 1)
    if mode in (*FOUR_BITS, MXFP4):
        out = _pack(backend, backend.ops.pack_nibbles, weight, words, gated)
        return out if mode == "w4a8" else out.flatten(2)
    flip = layout.byte_offset if mode == "w8a8" else 0
    out = _pack(backend, backend.ops.pack, weight, words, gated, flip)
    return out.view(torch.uint8) if mode == "w8a8" else out


def pack_scale(backend, scale: Tensor, gated: bool = False) -> Tensor:
    """Lay scales [N, groups] out -> [blocks, groups, c]."""
    return _pack(backend, backend.ops.pack, scale, 1, gated, 0).flatten(2)


def _pack(backend, operator: Callable, weight: Tensor, words: int, gated: bool, *more: int) -> Tensor:
    """Pack a weight [N, K], or those of all experts [E, N, K], one after the other. more: for the operator.
    """
    each, columns, halves = weight[None] if weight.dim() == 2 else weight, backend.layout.columns, 1 + gated
    blocks, per_byte = -(-weight.shape[-2] // halves // (columns // halves)), 1 if more else 2
    shape = len(each), blocks, weight.shape[-1] * per_byte // words, columns // per_byte, words
    out = _large_pages(shape, weight.dtype)
    for one, to in zip(each, out):
        operator(one, gated, *more, to)
    return out.flatten(0, 1)


# A pass reads every weight. Each small page of 4 KB costs it a walk through the page tables, and a processor
# does not fetch ahead beyond the page. So weights lie in large pages, where the system has them.
PAGE = 2 << 20  # bytes of a large page on x86-64, and mostly on aarch64
CHUNK = 64 << 20  # bytes asked for at a time; what is never written takes no memory
LINE = 64  # a tensor begins with a line of the cache
_rest = torch.empty(0, dtype=torch.uint8)  # of the latest chunk
_taking = threading.Lock()  # models may be loaded by several threads


def _large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor, beside those that were made before."""
    global _rest
    size = math.prod(shape) * dtype.itemsize
    room = size + -size % LINE
    with _taking:
        if room > _rest.numel():
            _rest = _chunk(max(room, CHUNK))
        place, _rest = _rest[:size], _rest[room:]
    return place.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    """Return `size` bytes from the beginning of a large page. They are freed with the last tensor in them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]
