"""The model on our CPU kernels: the same modules with their weights laid out for `kernels.cpu`.

`pack_models(target, head)` puts models there. Packing is for decoding only: packed modules have no gradient
and no `weight`.
"""
from __future__ import annotations

import contextlib
import math
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch import Tensor

from kernels import cpu
from kernels.parallel import Summed
from kernels.quantized import QuantizedLinear
from model import MLP, Block, Experts, KVCache, ModelArgs, Pass, RMSNorm, TargetBlock, Transformer
from networks.eagle import Eagle3Head
from networks.head import Head


class ByteCache(nn.Module):
    """`KVCache` in int8: each head of a slot in steps of its largest / 127, as csrc/in_bytes.h lays it out.

    k, v: [B, blocks of slots, nkv, bytes of a block], heads before blocks in memory. `dtype`, the model's,
    changes nothing.
    """

    def __init__(
        self, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.head_dim = args.head_dim
        for name, shape in zip(("k", "v"), self._shapes(batch, slots, args)):
            buffer = torch.zeros(shape, dtype=torch.uint8, device=device).transpose(1, 2)
            self.register_buffer(name, buffer, persistent=False)

    @staticmethod
    def _shapes(batch: int, slots: int, args: ModelArgs) -> list[tuple[int, ...]]:
        of_block, *sizes = cpu.byte_blocks(args.head_dim)
        return [(batch, args.num_kv_heads, -(-slots // of_block), size) for size in sizes]

    of_layers = classmethod(KVCache.of_layers.__func__)
    rows, take, put = KVCache.rows, classmethod(KVCache.take.__func__), KVCache.put

    @staticmethod
    def entries(cache: ByteCache, slots: int) -> int:
        """How many blocks hold so many slots."""
        return -(-slots // cpu.byte_blocks(cache.head_dim)[0])

    @classmethod
    def bytes(cls, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype) -> int:
        """What a cache takes."""
        return sum(map(math.prod, cls._shapes(batch, slots, args)))


class PackedLinear(nn.Module):
    """A `Linear`, a `QuantizedLinear` or a tied embedding, packed for x of this dtype.

    gated: the weight is gate and up together.
    """

    def __init__(self, linear: nn.Module, dtype: torch.dtype, gated: bool = False):
        super().__init__()
        self.columns, self.mode = len(linear.weight) // (2 if gated else 1), cpu.GATED if gated else cpu.SAME
        bias = None if isinstance(linear, nn.Embedding) else linear.bias
        scale = linear.scale if isinstance(linear, QuantizedLinear) else None
        self.packed = _constant(_packed(linear, dtype, gated))
        self.scale = None if scale is None else _constant(cpu.pack_scale(scale, gated))
        self.bias = None if bias is None else _constant(bias.detach().float())

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        return cpu.linear(x, self.packed, self.columns, self.scale, self.bias, onto, self.mode)

    def logits(self, x: Tensor) -> Tensor:
        """The same in float32: nothing is rounded to 16 bits after the sums."""
        return cpu.linear(x, self.packed, self.columns, self.scale, self.bias, None, cpu.FLOAT32)


def _packed(linear: nn.Module, dtype: torch.dtype, gated: bool) -> Tensor:
    """A layer's weight, laid out for x of this dtype."""
    weight = linear.weight.detach()
    if not isinstance(linear, QuantizedLinear):
        return cpu.pack(weight, 4 // dtype.itemsize, gated)
    if linear.mode == "w8a8":
        return cpu.pack_bytes(weight, gated)
    if linear.mode == "w4a8":
        return cpu.pack_w4a8(weight, gated)
    per_word = cpu.quantized_per_word(dtype)
    return (cpu.pack_int4 if linear.mode == "int4" else cpu.pack)(weight, per_word, gated)


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class PackedMLP(nn.Module):
    """`MLP`, the activation computed where gate and up are."""

    def __init__(self, mlp: MLP, dtype: torch.dtype):
        super().__init__()
        self.w_gate_up = PackedLinear(mlp.w_gate_up, dtype, gated=True)
        self.w_down = PackedLinear(mlp.w_down, dtype)

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        return self.w_down(self.w_gate_up(x), onto)


class PackedNorm(nn.Module):
    """`RMSNorm` on the kernel."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return cpu.rms_norm(x, self.weight, self.eps)


def attention(block: Block, qkv: Tensor, cache: KVCache, shared: Pass) -> Tensor:
    """`model.attention` on the kernel, which reads the mask as it is."""
    norms = () if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight, block.q_norm.eps)
    cos, sin = shared.angles(_angles)
    return cpu.attend(qkv, cos, sin, cache.k, cache.v, shared.slots, shared.visible, *norms)


def _angles(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`model.rope_table` as one operator."""
    return cpu.angles(positions, inv_freq.float(), args.rope_factor)


def run_layers(
    model: Transformer, x: Tensor, caches: nn.ModuleList, shared: Pass, aux_layers: tuple[int, ...]
):
    """`model.run_layers` as one operator, for a target of which every layer is packed."""
    x, features = cpu.layers(
        x, *shared.angles(_angles), *model.packed_weights, *_keys_and_values(caches), shared.slots,
        shared.visible, model.args.norm_eps, aux_layers,
    )
    return x, features if aux_layers else None


def run_block(block: Block, x: Tensor, cache: KVCache, shared: Pass, inputs: Tensor | None) -> Tensor:
    """`model.run_block` as one operator, for a packed layer."""
    read = None if isinstance(block, TargetBlock) else x if inputs is None else inputs
    x, _ = cpu.layers(
        x, *shared.angles(_angles), *block.packed_weights, [cache.k], [cache.v], shared.slots,
        shared.visible, block.mlp_norm.eps, read=read,
    )
    return x


def run_head(
    head: Eagle3Head, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor,
    caches: nn.ModuleList,
) -> Tensor:
    """`networks.eagle.run_head` as one operator, for a head of which every layer is packed."""
    first = head.layer
    return cpu.head(
        tokens, head.embed.weight, first.embed_norm.weight, feature, first.feature_norm.weight, positions,
        head.inv_freq, head.args.rope_factor, *head.packed_weights, *_keys_and_values(caches), slots, visible,
        first.mlp_norm.eps,
    )


def score_rows(head: Eagle3Head, x: Tensor) -> Tensor:
    """`networks.eagle.score_rows` as one operator."""
    norm, lm_head = head.norm, head.lm_head
    weights = lm_head.packed, lm_head.columns, lm_head.scale, lm_head.bias
    return cpu.normed_linear(x, norm.weight, norm.eps, *weights)


def _weights(layer: Block) -> tuple[list[Tensor], list[int]]:
    """What `cpu.layers` wants of a layer, collected once: asking modules takes as long as an operator."""
    a, o, gate_up, down = layer.wqkv, layer.wo, layer.mlp.w_gate_up, layer.mlp.w_down
    norms = (None, None) if layer.q_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
    attn_norm = layer.attn_norm.weight if isinstance(layer, TargetBlock) else None
    weights = [attn_norm, a.packed, a.scale, a.bias, *norms, o.packed, o.scale]
    weights += [layer.mlp_norm.weight, gate_up.packed, gate_up.scale, down.packed, down.scale]
    given = [w is not None for w in weights]
    return [w for w in weights if w is not None], [sum(1 << i for i, there in enumerate(given) if there)]


_CACHES: WeakKeyDictionary[nn.ModuleList, tuple[list[Tensor], list[Tensor]]] = WeakKeyDictionary()


def _keys_and_values(caches: nn.ModuleList) -> tuple[list[Tensor], list[Tensor]]:
    """The keys and the values of every layer, collected once: they keep their place."""
    if caches not in _CACHES:
        _CACHES[caches] = [cache.k for cache in caches], [cache.v for cache in caches]
    return _CACHES[caches]


def move(caches: nn.ModuleList, source: Tensor, target: Tensor) -> None:
    """`model.move` as one operator."""
    cpu.move(*_keys_and_values(caches), caches[0].head_dim, source, target)


def pack_models(*models: nn.Module) -> bool:
    """Put models on the kernels, in place. They may share modules, as a head shares its target's lm_head.

    `cpu.load_kernels` must have been called. What the kernels cannot take (float16, an odd number of bfloat16
    values, a GPU, the experts of a mixture) stays as it is. Returns whether every layer of the targets among
    them is on the kernels.
    """
    complete = True
    done: WeakKeyDictionary[nn.Module, PackedLinear] = WeakKeyDictionary()  # of what several models share

    def packed(module: nn.Module, dtype: torch.dtype) -> PackedLinear:
        if module not in done:
            done[module] = PackedLinear(module, dtype)
        return done[module]

    def pack_children(parent: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing holds a child that has been replaced: its memory is free before the next is packed."""
        if isinstance(parent, Block) and cpu.takes(parent.head_dim, dtype, device):
            parent.attention = attention
        for name in [name for name, _ in parent.named_children()]:
            child = parent.get_submodule(name)
            if isinstance(child, RMSNorm) and cpu.takes(2, dtype, device):
                setattr(parent, name, PackedNorm(child))
            elif isinstance(child, MLP) and _takes_mlp(child, dtype, device):
                setattr(parent, name, PackedMLP(child, dtype))
            elif _takes(child, dtype, device) and (name == "lm_head" or not isinstance(child, nn.Embedding)):
                setattr(parent, name, packed(child, dtype))
            elif not isinstance(child, Experts):
                pack_children(child, dtype, device)

    for model in models:
        dtype, device = model.embed.weight.dtype, model.embed.weight.device

        if model.lm_head is None and _takes(model.embed, dtype, device):
            model.lm_head = packed(model.embed, dtype)  # tied: the table stays, for reading embeddings
        pack_children(model, dtype, device)
        for block in model.modules():
            if isinstance(block, Block) and _is_packed(block):
                block.run, block.packed_weights = run_block, _weights(block)
        if isinstance(model, Transformer):
            if all(_is_packed(layer) for layer in model.layers):
                model.run_layers, model.move, model.on_kernels = run_layers, move, True
                model.packed_weights = _together(model.layers)
            elif all(_is_packed(layer, summed=True) for layer in model.layers):
                model.move, model.on_kernels = move, True  # its layers meet other ranks: a call for each part
            else:
                complete = False
        if isinstance(model, Head) and cpu.takes(model.args.head_dim, dtype, device):
            model.move = move
        if isinstance(model, Eagle3Head):
            _pack_head(model)
    return complete


def _pack_head(head: Eagle3Head) -> None:
    layers = [head.layer, *head.more_layers]
    norms = head.layer.embed_norm, head.layer.feature_norm
    plain = isinstance(head.embed, nn.Embedding) and not head.layer.norm_before_residual
    if plain and all(map(_is_packed, layers)) and all(isinstance(norm, PackedNorm) for norm in norms):
        head.packed_weights = _together(layers)
        head.inv_freq = head.inv_freq.float()
        head.run = run_head
    if isinstance(head.norm, PackedNorm) and isinstance(head.lm_head, PackedLinear):
        head.score = score_rows


def _together(layers) -> tuple[list[Tensor], list[int]]:
    """The weights of packed layers, one after the other."""
    each = [layer.packed_weights for layer in layers]
    return tuple([x for of in lists for x in of] for lists in zip(*each))


def threads_for(target: nn.Module) -> contextlib.AbstractContextManager:
    """A context to compile and run a target's passes in: `cpu.alone` if the target is on the kernels."""
    return cpu.alone() if target.on_kernels else contextlib.nullcontext()


def _takes(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a module is a linear layer or a table that the kernels can take."""
    if isinstance(module, QuantizedLinear):
        words = module.mode != "w8a8" or module.inputs % 4 == 0
        return module.mode != "fp8" and words and cpu.takes(module.inputs, dtype, device)
    linear = isinstance(module, (nn.Linear, nn.Embedding))
    return linear and module.weight.dtype == dtype and cpu.takes(module.weight.shape[1], dtype, device)


def _takes_mlp(mlp: MLP, dtype: torch.dtype, device: torch.device) -> bool:
    return _takes(mlp.w_gate_up, dtype, device) and _takes(mlp.w_down, dtype, device)


def _is_packed(layer: Block, summed: bool = False) -> bool:
    """Whether all of a layer is on the kernels. summed: apart from its sums over ranks."""
    wo, mlp = (x.layer if summed and isinstance(x, Summed) else x for x in (layer.wo, layer.mlp))
    linear = isinstance(layer.wqkv, PackedLinear) and isinstance(wo, PackedLinear)
    norms = [layer.mlp_norm, *([layer.attn_norm] if isinstance(layer, TargetBlock) else [])]
    rest = isinstance(mlp, PackedMLP) and all(isinstance(norm, PackedNorm) for norm in norms)
    return layer.attention is attention and linear and rest
