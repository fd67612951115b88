"""Models on `kernels.cpu.CpuBackend`, with weights packed for its operators.

`pack_models` converts models in place. Packed modules are for inference only: they have no gradient and no
`weight`. They call the operators (`ops`, see csrc/operators.cpp) of their backend.

Linear layers, MLPs and norms are replaced with packed modules. Blocks, targets and EAGLE-3 heads are kept,
and get an attribute `fused`, which computes their whole pass in one operator.
"""
from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor

from extensions import load
from head import Eagle3Head
from kernels.cpu_cache import CpuCaches, angles, head_norms
from kernels.quantized import EMBED, MXFP4, Quantized
from model import (
    MLP,
    Block,
    KVCache,
    PassInputs,
    RMSNorm,
    TargetBlock,
    Transformer,
)
from tree import Tree

if TYPE_CHECKING:
    from engine.draft import Drafter
    from engine.state import State
    from engine.step import Step

NO_COSTS = 0.0, None, None  # do not limit the tree by costs, see `engine.engine.Choice`
SAME_DTYPE, FLOAT32 = range(2)  # modes of `ops.linear`
GATES = {"silu": 2, "gelu_tanh": 3, "clamped_swiglu": 4}  # activation of the gate -> mode of `ops.linear`


# -- modules -----------------------------------------------------------------------------------


class Packed(nn.Module):
    """A weight [N, K], or [E, N, K] of all experts, packed for inputs of this dtype, with scales and bias.

    weight: a tensor, or a module with one. activation: the weight is gate and up, stacked; the output is
    activation(gate) * up.
    """

    def __init__(
        self, backend, weight: nn.Module | Tensor, bias: Tensor | None, dtype: torch.dtype,
        activation: str | None = None,
    ):
        super().__init__()
        self.backend, gated = backend, activation is not None
        quantized, kind = isinstance(weight, Quantized), getattr(weight, "kind", None)
        weight = load("kernels.stored:in_integers")(weight) if kind else weight
        values = getattr(weight, "weight", weight)
        self.columns, self.mode = values.shape[-2] // (2 if gated else 1), GATES.get(activation, SAME_DTYPE)
        mode = weight.mode if quantized else None
        self.packed = _constant(pack(backend, values.detach(), mode, dtype, gated))
        self.scale = None
        if quantized:
            pack_records = load("kernels.packed_more:pack_records") if kind else None
            self.scale = _constant(pack_records(backend, weight, gated, len(self.packed)) if kind
                                   else pack_scale(backend, weight.scale, gated))
        self.bias = None
        if bias is not None:
            self.bias = _constant(pack_scale(backend, bias.detach().float()[..., None], gated))

    @property
    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weight as the C++ type Operands (csrc/operators.cpp)."""
        return self.packed, self.scale, self.bias


class PackedLinear(Packed):
    """A `Linear`, a `QuantizedLinear` or a tied embedding; see `Packed`."""

    def __init__(self, backend, linear: nn.Module, dtype: torch.dtype, activation: str | None = None):
        super().__init__(backend, linear, linear.bias, dtype, activation)
        self.order = getattr(linear, "order", None)

    def forward(self, x: Tensor, residual: Tensor | None = None, mode: int | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype, rounded once, after adding bias and `residual` [..., N]."""
        x, mode = x if self.order is None else x[..., self.order], self.mode if mode is None else mode
        return self.backend.ops.linear(x, *self.operands, residual, self.columns, mode)

    def logits(self, x: Tensor) -> Tensor:
        """Return the output in float32, without rounding to 16 bits."""
        return self(x, None, FLOAT32)


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class PackedMLP(nn.Module):
    """`MLP` with the activation fused into the first product."""

    def __init__(self, backend, mlp: MLP, dtype: torch.dtype):
        super().__init__()
        self.w_gate_up = PackedLinear(backend, mlp.w_gate_up, dtype, mlp.activation)
        self.w_down = PackedLinear(backend, mlp.w_down, dtype)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.w_down(self.w_gate_up(x), residual)


class PackedNorm(nn.Module):
    """`RMSNorm` as an operator, with its weight in float32."""

    def __init__(self, backend, norm: RMSNorm):
        super().__init__()
        self.backend, self.weight, self.eps = backend, norm.weight, norm.eps
        self.register_buffer("scale", norm.scale.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.ops.rms_norm(x, self.scale, self.eps)


# -- whole passes ------------------------------------------------------------------------------


class FusedBlock:
    """The pass of one layer as one operator. weights: see `_weights`."""

    def __init__(self, block: Block):
        self.weights = _weights(block)

    def __call__(
        self, block: Block, x: Tensor, cache: KVCache, shared: PassInputs, inputs: Tensor | None = None
    ) -> Tensor:
        """See `Block.forward`."""
        if isinstance(block, TargetBlock):
            inputs = None
        elif inputs is None:
            inputs = x
        ops, eps = block.wqkv.backend.ops, block.mlp_norm.eps
        layer_table = ops.layer_table(*self.weights, [cache.k], [cache.v], eps)
        cos_sin = block.layer_cos_sin(shared.cos_sin(partial(angles, ops)))
        x, _ = ops.layers(x, *cos_sin, layer_table, shared.slots, shared.visible, eps, (), inputs)
        return x


class FusedTransformer:
    """The pass of a whole target as one operator. lm_head: see `_lm_head`."""

    def __init__(self, target: Transformer, lm_head: tuple):
        self.weights, self.lm_head = _joined_weights(target.layers), lm_head
        self.embedding_scale = target.args.embedding_scale(target.embed.dtype)

    def __call__(
        self, target: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor,
        caches: CpuCaches, aux_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """See `Transformer.forward`."""
        inputs = tokens, positions, slots, visible, self.embedding_scale, aux_layers
        x, features = target.backend.ops.target_forward(*inputs, *caches.network(target))
        return x, features if aux_layers else None

    def verify(
        self, target: Transformer, drafted: Tree, length: Tensor, slots: int, caches: CpuCaches,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `Step.verify` in one operator. slots: number of live slots."""
        nodes = drafted.tokens, drafted.depth, drafted.ancestors, length, slots
        model = self.embedding_scale, aux_layers, *self.lm_head
        logits, features = target.backend.ops.verify(*nodes, *model, *caches.network(target))
        return logits, features if aux_layers else None


class FusedEagle3Head:
    """The pass of all layers of an EAGLE-3 head as one operator.

    has_draft_operator: `draft` grows the whole tree in one operator. lm_head: see `_lm_head`.
    """

    def __init__(self, head: Eagle3Head, lm_head: tuple | None):
        self.weights, self.lm_head = _joined_weights([head.layer, *head.more_layers]), lm_head
        self.has_draft_operator = lm_head is not None and head.feeds_residual

    def __call__(
        self, head: Eagle3Head, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor,
        visible: Tensor, caches: CpuCaches,
    ) -> Tensor:
        """See `Eagle3Head.forward`."""
        network = self._network(head, caches)
        return head.backend.ops.head_forward(tokens, feature, positions, slots, visible, *network)

    def _network(self, head: Eagle3Head, caches: CpuCaches) -> tuple:
        """Return the head as the C++ type Head (csrc/operators.cpp)."""
        return head.layer.embed_norm.scale, head.layer.feature_norm.scale, *caches.network(head)

    def draft(
        self, step: Step, drafter: Drafter, state: State, slots: Tensor, noise: Tensor | None, costs
    ) -> tuple:
        """Compute `Step.draft` in one operator. Returns the fields of the tree, and its number of levels."""
        head, shape = drafter.network, drafter.shape
        ops, fc = head.backend.ops, head.fc
        sizes = slots.shape[0], shape.nodes, shape.depth, shape.width
        arguments = (
            state.root, state.length, *sizes, *(costs or NO_COSTS), *self.lm_head,
            noise if drafter.coupled else None, head.draft_ids, *self._network(head, drafter.caches),
        )
        if getattr(head, "fc_norms", None) or not isinstance(fc, PackedLinear):
            # `ops.draft` needs one packed `fc`: other heads catch up in PyTorch.
            return ops.grow(drafter.catch_up(step, state, slots), *arguments)
        unread = drafter.own_features(state.features), state.max_commit, *fc.operands, fc.columns
        return ops.draft(state.tokens, state.n_unread, *unread, *arguments)


# -- packing models ----------------------------------------------------------------------------


def pack_models(backend, *models: nn.Module) -> bool:
    """Pack models in place, see `CpuBackend.prepare`."""
    cache: WeakKeyDictionary[nn.Module, PackedLinear] = WeakKeyDictionary()  # models may share modules

    def pack_linear(module: nn.Module, dtype: torch.dtype) -> PackedLinear:
        if module not in cache:
            cache[module] = PackedLinear(backend, module, dtype)
        return cache[module]

    def pack_children(parent: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the children that operators support. Each is freed before the next is packed.

        The lm_head, the largest, comes first, while memory use is low.
        """
        for name in sorted((name for name, _ in parent.named_children()), key=lambda name: name != "lm_head"):
            child = parent.get_submodule(name)
            if isinstance(child, RMSNorm) and supports_row_size(2, dtype, device):
                setattr(parent, name, PackedNorm(backend, child))
            elif isinstance(child, MLP) and all(supports_module(w, dtype, device) for w in child.children()):
                setattr(parent, name, PackedMLP(backend, child, dtype))
            elif is_mixture(child) and supports_module(child, dtype, device):
                setattr(parent, name, load("kernels.packed_more:PackedExperts")(backend, child, dtype))
            elif name != "lm_head" and is_table(child):
                continue  # operators read rows of the unpacked table
            elif supports_module(child, dtype, device):
                if name == EMBED and isinstance(child, Quantized):
                    layer = load("kernels.packed_more:PackedEmbedding")(backend, child, dtype)
                else:
                    layer = pack_linear(child, dtype)
                setattr(parent, name, layer)
            elif not is_mixture(child):
                pack_children(child, dtype, device)

    all_run = True
    for model in models:
        dtype, device = model.embed.dtype, model.embed.device
        if model.lm_head is None and supports_module(model.embed, dtype, device):
            model.lm_head = pack_linear(model.embed, dtype)  # tied: keep the table for the embeddings
        pack_children(model, dtype, device)
        attention_runs = supports_row_size(model.args.head_dim, dtype, device)
        if attention_runs:
            model.Caches = backend.caches["auto"]
            for block in filter(lambda module: isinstance(module, Block), model.modules()):
                if block.sinks is not None:
                    block.sinks = _constant(block.sinks.detach().float())
                if block.standard and _is_packed(block, fused=True):
                    block.fused = FusedBlock(block)
        if isinstance(model, Transformer):
            # Sharded layers cannot be fused, because of the all-reduces in them.
            layers_run = all(_is_packed(layer, sharded=True) for layer in model.layers)
            model.runs_on_backend = attention_runs and layers_run
            all_run = all_run and model.runs_on_backend
            lm_head = _lm_head(model)
            if model.runs_on_backend and lm_head is not None and all(layer.fused for layer in model.layers):
                model.fused = FusedTransformer(model, lm_head)
        if isinstance(model, Eagle3Head) and _runs_fused(model):
            model.fused = FusedEagle3Head(model, _lm_head(model))
    return all_run


def _runs_fused(head: Eagle3Head) -> bool:
    """Return whether `ops.head_forward` supports this head."""
    first = head.layer
    is_standard = is_table(head.embed) and not getattr(first, "norm_before_residual", False)
    norms_packed = all(isinstance(norm, PackedNorm) for norm in (first.embed_norm, first.feature_norm))
    return is_standard and norms_packed and all(layer.fused for layer in (first, *head.more_layers))


def _lm_head(model: Transformer | Eagle3Head) -> tuple | None:
    """Return the final norm and the lm_head as the C++ type LmHead (csrc/operators.cpp).

    None if they are not packed.
    """
    norm, head = model.norm, model.lm_head
    is_packed = isinstance(norm, PackedNorm) and isinstance(head, PackedLinear) and head.order is None
    return (norm.scale, *head.operands, head.columns) if is_packed else None


def _weights(layer: Block) -> tuple[list[Tensor], list[int]]:
    """Return a layer's weights, and [present, window, mode]: arguments of csrc/operators.cpp: layer_table.

    They are collected once, as reading attributes of modules takes as long as an operator.
    """
    gate_up, down = layer.mlp.w_gate_up, layer.mlp.w_down
    attn_norm, wo_norm, mlp_norm, down_norm = (
        getattr(getattr(layer, name, None), "scale", None)
        for name in ("attn_norm", "wo_norm", "mlp_norm", "mlp_out_norm")
    )
    weights = [attn_norm, *layer.wqkv.operands, *head_norms(layer)[:2], layer.sinks, *layer.wo.operands]
    weights += [wo_norm, mlp_norm, *gate_up.operands, *down.operands, down_norm]
    present = 0  # bit i: weight i is not None
    if hasattr(layer.mlp, "bits"):  # `PackedExperts`
        weights, present = [*weights, *layer.mlp.router.operands], layer.mlp.bits
    present |= sum(1 << i for i, w in enumerate(weights) if w is not None)
    return [w for w in weights if w is not None], [present, layer.window, gate_up.mode]


def _joined_weights(layers: Iterable[Block]) -> tuple[list[Tensor], list[int]]:
    """Concatenate the `_weights` of fused layers."""
    weights = [layer.fused.weights for layer in layers]
    return tuple([x for part in parts for x in part] for parts in zip(*weights))


def is_table(module: nn.Module) -> bool:
    """Return whether a module is an embedding table that operators can read."""
    return isinstance(module, nn.Embedding) or hasattr(module, "table")


def is_mixture(module: nn.Module | Tensor) -> bool:
    """Return whether a module is a `families.experts.Experts`, which is not imported for other models."""
    return getattr(module, "is_mixture", False)


def supports_row_size(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether operators support rows of this size: any in float32, even sizes in bfloat16."""
    return device.type == "cpu" and (dtype == torch.float32 or (dtype == torch.bfloat16 and columns % 2 == 0))


def supports_module(module: nn.Module | Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a linear layer, an embedding, a stack of experts or a mixture can be packed."""
    if is_mixture(module):
        parts = module.router, module.w_gate_up, module.w_down
        return all(supports_module(part, dtype, device) for part in parts)
    if isinstance(module, Quantized):
        full_words = module.mode not in ("w8a8", "q8") or module.inputs % 4 == 0
        return module.mode != "fp8" and full_words and supports_row_size(module.inputs, dtype, device)
    weight = module.weight if isinstance(module, nn.Linear | nn.Embedding) else module
    has_dtype = isinstance(weight, Tensor) and weight.dtype == dtype
    return has_dtype and supports_row_size(weight.shape[-1], dtype, device)


def _is_packed(layer: Block, sharded: bool = False, fused: bool = False) -> bool:
    """Return whether all parts of a layer are packed. sharded: some are wrapped in `tp.AllReduced`.

    fused: also require that no inputs are reordered, as fused operators cannot.
    """
    if fused and any(getattr(part, "order", None) is not None for part in layer.modules()):
        return False
    wo, mlp = (getattr(x, "layer", x) if sharded else x for x in (layer.wo, layer.mlp))
    linear = isinstance(layer.wqkv, PackedLinear) and isinstance(wo, PackedLinear)
    norms = [layer.mlp_norm, *([layer.attn_norm] if isinstance(layer, TargetBlock) else [])]
    normed = all(isinstance(norm, PackedNorm | nn.Identity) for norm in norms)
    packed_types = PackedMLP | PackedLinear
    parts = (mlp,) if isinstance(mlp, packed_types) else mlp.children()  # shared and routed experts
    return linear and all(isinstance(x, packed_types) for x in parts) and normed


# -- packing weights ---------------------------------------------------------------------------


def pack(backend, weight: Tensor, mode: str | None, dtype: torch.dtype, gated: bool = False) -> Tensor:
    """Pack a weight [N, K] for inputs of this dtype -> [blocks, K/w, c, w]; rows beyond N are zero.

    A block has c outputs and is read sequentially, once per pass; w inputs form a word. Experts' weights
    [E, N, K] are concatenated. gated: half of a block's outputs are gate, half are up.
    mode: that of a quantized weight, stored as in `QuantizedLinear`; None: not quantized, words of 4 bytes.
    mxfp4, q4: two values per byte, the first half of the block in the low bits; [blocks, K/w, c/2 * w] uint8
    for mxfp4, [blocks, K/w, c/2, w] for q4. q6: [blocks, K/w, 3/4 c, w], see csrc/packing.h. w8a8, q8: plus
    `w8a8_zero_point`, 128 for instruction sets that multiply unsigned by signed bytes.
    """
    layout, in_bytes = backend.layout, mode in ("w8a8", "q8")
    if mode is None:
        words = 4 // dtype.itemsize
    elif in_bytes:
        words = layout.bytes_per_word
    elif mode in ("q4", "q6"):
        words = layout.nibbles_per_word
    else:
        words = layout.bf16_per_word if dtype == torch.bfloat16 else 1
    if mode in ("q4", MXFP4):
        out = _pack(backend, backend.ops.pack_nibbles, 4, weight, words, gated)
        return out if mode == "q4" else out.flatten(2)
    if mode == "q6":
        return _pack(backend, backend.ops.pack_sixes, 6, weight, words, gated)
    out = _pack(backend, backend.ops.pack, 8, weight, words, gated, layout.w8a8_zero_point if in_bytes else 0)
    return out.view(torch.uint8) if in_bytes else out


def pack_scale(backend, scale: Tensor, gated: bool = False) -> Tensor:
    """Pack scales [N, groups] -> [blocks, groups, c]."""
    return _pack(backend, backend.ops.pack, 8, scale, 1, gated, 0, empty=torch.empty).flatten(2)


def _pack(
    backend, operator: Callable, bits: int, weight: Tensor, words: int, gated: bool, *zero_point: int,
    empty: Callable | None = None,
) -> Tensor:
    """Pack a weight [N, K], or the weights of all experts [E, N, K].

    bits: per value, at most 8 (8 also stands for wider types). zero_point: see csrc/packing.h: pack.
    """
    weights, columns = weight[None] if weight.dim() == 2 else weight, backend.layout.columns
    halves = 1 + gated
    blocks = -(-weight.shape[-2] // halves // (columns // halves))
    shape = len(weights), blocks, weight.shape[-1] * 8 // bits // words, columns * bits // 8, words
    out = (empty or empty_in_huge_pages)(shape, dtype=weight.dtype)
    for expert, packed in zip(weights, out):
        operator(expert, gated, *zero_point, packed)
    return out.flatten(0, 1)


# Use huge pages for weights if available: a pass reads all of them, 4 KB pages cause TLB misses, and hardware
# prefetching stops at page boundaries.
HUGE_PAGE_BYTES = 2 << 20  # on x86-64, and mostly on aarch64
CHUNK_BYTES = 256 << 20  # per allocation; pages that are never written take no memory
CACHE_LINE_BYTES = 64
_free_chunk = torch.empty(0, dtype=torch.uint8)  # unused end of the latest chunk
_chunk_lock = threading.Lock()  # several threads may load models


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor, allocated directly after the previous one."""
    global _free_chunk
    size = math.prod(shape) * dtype.itemsize
    aligned = size + -size % CACHE_LINE_BYTES
    with _chunk_lock:
        if aligned > _free_chunk.numel():
            _free_chunk = _allocate_chunk(max(aligned, CHUNK_BYTES))
        memory, _free_chunk = _free_chunk[:size], _free_chunk[aligned:]
    return memory.view(dtype).view(shape)


def _allocate_chunk(size: int) -> Tensor:
    """Return `size` bytes, aligned to huge pages. They are freed with the last tensor in them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # this Linux kernel has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:size]
