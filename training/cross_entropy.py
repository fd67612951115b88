"""Cross-entropy over a large vocabulary, a block of rows at a time."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of an lm_head's logits with a teacher's distribution, weighted and summed.

    Logits are as large as the vocabulary and would be written and read a dozen times. Here a block of them
    stays in the cache until its loss, its choices and its gradients are done. The gradients are computed with
    the loss, so `weight` must be final: what the loss of each row counts.

    x [M, H], lm_head [V, H], teacher's logits [N, V] of which row i learns from teacher[places[i]], weight
    [M]. Returns (weighted sum [], choices [M] without gradient).
    """

    @staticmethod
    def forward(ctx, x: Tensor, lm_head: Tensor, teacher: Tensor, places: Tensor, weight: Tensor):
        needs_x, needs_head = ctx.needs_input_grad[:2]
        M, x_dtype = x.shape[0], x.dtype
        x, w = x.to(teacher.dtype), lm_head.to(teacher.dtype)
        losses, choices = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.int64)
        slopes = x.new_empty(M, lm_head.shape[0]) if needs_x or needs_head else None  # of the logits
        block = 128 if x.device.type == "cpu" else 4096
        for i in range(0, M, block):
            at = slice(i, i + block)
            logits, label = F.linear(x[at], w).float(), teacher[places[at]].float().softmax(-1)
            choices[at] = logits.argmax(-1)
            losses[at] = logits.logsumexp(-1) - torch.linalg.vecdot(logits, label)
            if slopes is not None:
                slopes[at] = torch.softmax(logits, -1, out=logits).sub_(label).mul_(weight[at, None])
        dx = (slopes @ w).to(x_dtype) if needs_x else None
        dw = (slopes.T @ x).to(lm_head.dtype) if needs_head else None
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(choices)
        return (losses * weight).sum(), choices

    @staticmethod
    def backward(ctx, slope: Tensor, _):
        return *(None if d is None else d * slope for d in ctx.saved_tensors), None, None, None
