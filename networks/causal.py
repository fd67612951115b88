"""A causal pass over complete sequences without a KV cache, for training and scoring."""
from __future__ import annotations

import torch
from torch import Tensor

from model import TargetBlock, Transformer, rope_table


def causal(
    target: Transformer, tokens: Tensor, aux_layers: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """Run `Transformer.forward` over complete sequences [B, T]."""
    T = tokens.shape[1]
    at = torch.arange(T, device=tokens.device)
    angles = rope_table(target.args, target.for_length(T).inv_freq, at[None])

    def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:
        heads = layer.norm_and_rotate(layer.project(x), *layer.layer_cos_sin(angles))
        q, k, v = (t.transpose(1, 2) for t in layer.split(heads))
        groups, bias = q.shape[1] // k.shape[1], None
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if 0 < layer.window < T:
            in_window = (at <= at[:, None]) & (at > at[:, None] - layer.window)
            bias = torch.zeros_like(in_window, dtype=q.dtype).masked_fill(~in_window, float("-inf"))
        return layer.finish(x, layer.attention(q, k, v, bias).transpose(1, 2).flatten(2))

    return target.run_layers(tokens, aux_layers, apply)
