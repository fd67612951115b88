"""Models on our GPU kernels: attention from wqkv to wo as one kernel, the caches of all layers as one tensor.

The products stay torch's, or those of `kernels.quantized`.
"""
from __future__ import annotations

import torch.nn as nn
from torch import Tensor

import model
from kernels.gpu.attention import attend
from kernels.gpu.cache import LayerCache, move
from kernels.parts import Sight
from model import Block, Pass, Transformer
from networks.head import Head


def attention(block: Block, qkv: Tensor, cache: LayerCache, shared: Pass) -> Tensor:
    """`model.attention` as one kernel; by its definition where the mask is given whole."""
    sight = shared.visible
    if not isinstance(sight, Sight):
        return model.attention(block, qkv, cache, shared)
    norms = (None, None, 0.0)
    if block.q_norm is not None:
        norms = block.q_norm.weight, block.k_norm.weight, block.q_norm.eps
    return attend(qkv, *shared.angles(), *norms, cache.kv, cache.layer, sight.length, sight.local)


def put_on_kernels(*models: nn.Module) -> None:
    """Let targets and heads, on a GPU, run on our kernels."""
    for each in models:
        if isinstance(each, Transformer):
            each.move, each.reads_length = move, True
        if isinstance(each, Transformer | Head):
            each.Cache = LayerCache
        for block in each.modules():
            if isinstance(block, Block):
                block.attention = attention
