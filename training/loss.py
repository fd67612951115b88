"""What a head's guesses cost, over a large vocabulary, a block of rows at a time.

"ce" is the cross-entropy with the target's distribution p. The others are logarithms of how often a draft is
accepted, which is what counts: "lk" by rejection sampling, sum_x min(p_x, q_x) (LK losses, arXiv 2602.23881),
and "coupled" by the rule that this project has, where target and head draw with one noise: sum_x 1 /
sum_y max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh, arXiv 2408.07978).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 24  # tokens that "coupled" looks at, the likeliest of p and q; all others count as one
LEAST = 1e-6  # probability that "coupled" takes nothing to be below


def row_loss(kind: str, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [n] of logits [n, V] where the target has probabilities p [n, V], float32.

    Returns these, their gradients by the logits [n, V], and sum_x min(p_x, q_x) [n].
    """
    lse = logits.logsumexp(-1, keepdim=True)
    q = (logits - lse).exp_()
    overlap = torch.minimum(p, q).sum(-1)
    if kind == "ce":
        return lse[:, 0] - torch.linalg.vecdot(logits, p), q - p, overlap
    if kind == "lk":
        slope = q * (q < p)
        slope = (q * slope.sum(-1, keepdim=True) - slope) / overlap[:, None]
        return -overlap.log(), slope, overlap
    loss, slope = _coupled(p, q)
    return loss, slope, overlap


def _coupled(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """-log of how often p and q draw the same with one noise [n], and its gradient by q's logits [n, V].

    The tokens beside the top count as one on which they never agree.
    """
    top = torch.maximum(p, q).topk(min(TOP, p.shape[1]), dim=-1).indices

    def parts(x: Tensor) -> Tensor:
        """Probabilities of the top, then of all others together [n, TOP + 1]."""
        chosen = x.gather(1, top)
        return torch.cat((chosen, 1 - chosen.sum(-1, keepdim=True)), -1).clamp(min=LEAST)

    a, b = parts(p), parts(q)
    other_p, other_q = (x[:, None] / x[..., None] for x in (a, b))  # [n, x, y]: y's share of x's
    counts = other_q > other_p
    s = torch.where(counts, other_q, other_p)[:, :-1].sum(-1)  # [n, TOP]
    agree = (1 / s).sum(-1)
    by_s = 1 / (agree[:, None] * s * s)  # of the loss, as the s of each x grows
    by_pair = by_s[..., None] * (other_q * counts)[:, :-1]  # of log q_y, by x
    slope = by_pair.sum(1)
    slope[:, :-1] -= by_pair.sum(-1)
    # To the logits: what the others gain together each of them gains by its share.
    rest = (slope[:, -1:] / b[:, -1:]) * q
    rest.scatter_(1, top, slope[:, :-1])
    return -agree.log(), rest - q * slope.sum(-1, keepdim=True)


class DraftLoss(torch.autograd.Function):
    """A loss of an lm_head's logits, weighted and summed.

    Logits are as large as the vocabulary and would be written and read a dozen times. Here a block of them
    stays in the cache until its loss, its choices and its gradients are done. The gradients are computed with
    the loss, so `weight` must be final: what the loss of each row counts.

    x [M, H], lm_head [V, H], teacher's logits [N, V] of which row i learns from teacher[places[i]], weight
    [M]. kinds: the losses with what each counts. Returns the weighted sum [], and without gradient choices
    [M] and sum_x min(p_x, q_x) [M].
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, lm_head: Tensor, teacher: Tensor, places: Tensor, weight: Tensor,
        kinds: tuple[tuple[str, float], ...] = (("ce", 1.0),),
    ):
        needs_x, needs_head = ctx.needs_input_grad[:2]
        M, x_dtype = x.shape[0], x.dtype
        x, w = x.to(teacher.dtype), lm_head.to(teacher.dtype)
        losses, overlaps = x.new_zeros(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32)
        choices = x.new_empty(M, dtype=torch.int64)
        slopes = x.new_empty(M, lm_head.shape[0]) if needs_x or needs_head else None  # of the logits
        block = 128 if x.device.type == "cpu" else 4096
        for i in range(0, M, block):
            at = slice(i, i + block)
            logits, p = F.linear(x[at], w).float(), teacher[places[at]].float().softmax(-1)
            choices[at] = logits.argmax(-1)
            slope = 0.0
            for kind, share in kinds:
                loss, by_logits, overlaps[at] = row_loss(kind, logits, p)
                losses[at] += share * loss
                slope = by_logits.mul_(share) + slope
            if slopes is not None:
                slopes[at] = slope.mul_(weight[at, None])
        dx = (slopes @ w).to(x_dtype) if needs_x else None
        dw = (slopes.T @ x).to(lm_head.dtype) if needs_head else None
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(choices, overlaps)
        return (losses * weight).sum(), choices, overlaps

    @staticmethod
    def backward(ctx, slope: Tensor, *_):
        return *(None if d is None else d * slope for d in ctx.saved_tensors), None, None, None, None
