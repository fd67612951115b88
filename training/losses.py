"""Losses over a large vocabulary, and the objective of each kind of head.

All are means over the predictions of a complete optimizer step, computed as weighted sums over its parts: the
gradient is the same however a step is split into smaller batches or over processes.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.folder import identity
from common.writing import digest
from drafters.estimate import TTT_STEPS
from engine.graphs import compile_graph
from head import Head
from model import Transformer
from networks.p_eagle import PEagleHead
from networks.weights import copy_head, own_state
from training.batches import Batch
from training.chains import block_outputs, eagle1_outputs, eagle3_outputs, p_eagle_outputs
from training.features import TargetStates

STEP_DECAY = 0.8  # weight of draft step i is STEP_DECAY**i (SafeAILab/EAGLE traineagle3)
TOKEN_LOSS_WEIGHT = 0.1  # of EAGLE-1's token loss, beside its regression (arXiv 2401.15077, section 4.2)
NOISE_WIDTH = 0.1  # half-width of the noise on EAGLE-1's features, by their root mean square (same section)


def row_loss(logits: Tensor, p: Tensor, lk: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [n] of logits [n, V] for the target's probabilities p [n, V], their gradients by the
    logits [n, V], and the acceptance rates under rejection sampling, sum_x min(p_x, q_x) [n]. All float32.

    A loss is the weighted mean of the cross-entropy with p (weight 1 - lk) and -log of the acceptance rate
    (weight lk; LK losses, arXiv 2602.23881).
    """
    lse = logits.logsumexp(-1, keepdim=True)
    q = (logits - lse).exp_()
    overlap = torch.minimum(p, q).sum(-1)
    loss, slope = lse[:, 0] - torch.linalg.vecdot(logits, p), q - p
    if lk:
        loss = torch.lerp(loss, -overlap.log(), lk)
        nearer = q * (q < p)
        slope.lerp_((q * nearer.sum(-1, keepdim=True) - nearer) / overlap[:, None], lk)
    return loss, slope, overlap


class DraftLoss(torch.autograd.Function):
    """A loss of an lm_head's logits, weighted and summed.

    Logits are as large as the vocabulary and would be written and read a dozen times. Here a block of them
    stays in the cache until its loss, its choices and its gradients are done. The gradients are computed with
    the loss, so `weight`, the weight of each row's loss, must be final.

    x [M, H], lm_head [V, H], teacher's logits [N, V], weight [M]. Row i learns from teacher[index[i]].
    Returns the weighted sum [] and, without gradient, sum_x min(p_x, q_x) [M] and whether the first choice is
    the teacher's [M], 1.0 or 0.0.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, lm_head: Tensor, teacher: Tensor, index: Tensor, weight: Tensor, lk: float = 0.0
    ):
        needs_x, needs_head = ctx.needs_input_grad[:2]
        M, x_dtype = x.shape[0], x.dtype
        x, w = x.to(teacher.dtype), lm_head.to(teacher.dtype)
        totals, overlaps, right = x.new_empty(3, M, dtype=torch.float32)
        slopes = x.new_empty(M, lm_head.shape[0]) if needs_x or needs_head else None  # of the logits
        block = 128 if x.device.type == "cpu" else 4096
        for i in range(0, M, block):
            at = slice(i, i + block)
            logits, p = F.linear(x[at], w).float(), teacher[index[at]].float().softmax(-1)
            right[at] = (logits.argmax(-1) == p.argmax(-1)).float()
            totals[at], slope, overlaps[at] = row_loss(logits, p, lk)
            if slopes is not None:
                slopes[at] = slope.mul_(weight[at, None])
        dx = (slopes @ w).to(x_dtype) if needs_x else None
        dw = (slopes.T @ x).to(lm_head.dtype) if needs_head else None
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(overlaps, right)
        return (totals * weight).sum(), overlaps, right

    @staticmethod
    def backward(ctx, slope: Tensor, *_):
        return *(None if d is None else d * slope for d in ctx.saved_tensors), None, None, None, None


class Objective:
    """A head, its loss on a batch, and the head that is written at the end.

    lk: weight of that loss, see `row_loss`. start: the head that this one was initialized from, if any.
    `aux_layers` are the target's layers whose states the loss reads. Each kind has two methods:

    learn_scale(states, real) sets `scale`, which divides features, from the target's states on some text;
    real [B, T]: False on padding.

    loss(batch, states, scored, seeds) returns (loss [], correct first choices [steps]) of a batch with the
    target's states on it. The batch may be a part of an optimizer step: scored counts the predictions of each
    draft step in all of it. seeds: of the noise on each row. A first choice is correct if it is the target's
    among the draft ids. A token of the text outside them is a miss.
    """

    outputs = None  # one of `training.chains`
    decay = 1.0  # the weight of draft step i is decay**i
    sampled = retention = 1.0  # of chains, see `Batch`

    def __init__(
        self, target: Transformer, head: Head, steps: int, *, lk: float = 0.0, start: Head | None = None,
        compiled: bool = False,
    ):
        self.target, self.head, self.steps, self.lk = target, head, steps, lk
        self.start = start
        self.device, self.dtype = target.embed.device, target.embed.dtype
        self.aux_layers = head.args.aux_layers
        self.run = compile_graph(type(self).outputs, dynamic=True) if compiled else type(self).outputs
        self.in_draft = torch.zeros(head.args.vocab_size, dtype=torch.bool)
        self.in_draft[head.draft_ids.cpu()] = True
        self.scale = torch.ones((), device=self.device)

    def batch(self, rows: list[dict], steps: int, seeds: list[int] | None = None) -> Batch:
        """Return rows as a batch on the device. seeds: of the chains drawn from each row; None takes all."""
        return Batch(rows, steps, self.in_draft, self.device, sampled=self.sampled,
                     retention=self.retention, seeds=seeds)

    def autocast(self):
        """Return a context for bfloat16 products if the target is in bfloat16; the head is in float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def weights(self, batch: Batch, scored: list[int]) -> Tensor:
        """Return the weight of each prediction's loss [M]. scored: as for `loss`."""
        by_step = torch.tensor([self.decay**i / max(1, n) for i, n in enumerate(scored)], device=self.device)
        return by_step[batch.step]

    def hits(self, batch: Batch, right: Tensor) -> Tensor:
        """Sum what `DraftLoss` found right [M] by draft step [steps]."""
        return right.new_zeros(len(batch.scored)).index_add(0, batch.step, right)

    def settings(self) -> dict:
        """Return what changes the loss: runs that differ here are different runs."""
        start, ids = identity(self.start) if self.start else "", digest(self.head.draft_ids.tolist())
        return {"kind": type(self.head).__name__, "steps": self.steps, "lk": self.lk, "draft_ids": ids,
                "start": start}

    def trained(self) -> Head:
        """Return a copy of the head that reads unscaled features, in float32."""
        return copy_head(self.head, self.target, torch.float32)


class Eagle3Objective(Objective):
    """EAGLE-3 by training-time test: its distribution against the target's, over the draft vocabulary."""

    outputs, decay = eagle3_outputs, STEP_DECAY

    def __init__(self, target: Transformer, head: Head, steps: int | None = None, **more):
        super().__init__(target, head, head.args.drafts or steps or TTT_STEPS, **more)
        self.lm_head_weight = target.output_layer.weight[head.draft_ids]
        self.cap_logits = getattr(target, "cap_logits", lambda x: x)  # of `families.variants`

    def loss(self, batch: Batch, states: TargetStates, scored: list[int], seeds: list[int]):
        args = self.head.args
        features = (states.features / self.scale).to(states.features.dtype)
        with self.autocast():
            x = self.run(self.head, batch, features, len(batch.scored))
        teacher = self.cap_logits(F.linear(batch.after(states.normed), self.lm_head_weight))
        weight, rows, lm_head = self.weights(batch, scored), x, self.head.lm_head.weight
        if getattr(args, "markov_rank", 0):  # one product with both lm_heads: their sum is the logits
            with self.autocast():
                reads = self.head.markov_input(rows, batch.before())
            x = torch.cat((rows, reads.to(rows.dtype)), -1)
            lm_head = torch.cat((lm_head, self.head.markov_out.weight), -1)
        loss, accepted, right = DraftLoss.apply(x, lm_head, teacher, batch.teacher_index, weight, self.lk)
        if getattr(args, "confidence", False):
            with self.autocast():
                logits = self.head.confidence_logit(rows, batch.before())
            errors = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
            loss = loss + (errors * weight).sum()
        return loss, self.hits(batch, right)

    def learn_scale(self, states: TargetStates, real: Tensor) -> None:
        """Set `scale` to the root mean square of every feature [F].

        A target's residual stream has channels tens of times larger than the rest. Adam moves all weights at
        one rate, so `fc` learns badly from raw features. It is trained on features divided by this scale, and
        `trained` folds the division into its weights. The first token, an attention sink, is left out.
        """
        if getattr(self.head, "fc_norms", None):
            return  # `fc` reads normed features
        real = real.clone()
        real[:, 0] = False
        self.scale = states.features.float()[real].pow(2).mean(0).sqrt().clamp(min=1e-6)
        initialized = own_state(self.start) if self.start else ()
        for name, p, factor in self._scaled(self.head):
            if name in initialized:  # it is of a head that reads unscaled features
                p.data *= factor

    def trained(self):
        head = super().trained()
        for _, p, factor in self._scaled(head):
            p.data /= factor
        return head

    def _scaled(self, head: Head) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, weight, factor) of the weights of a head that `scale` changes."""
        changed = [("fc.weight", head.fc.weight, self.scale)]
        if isinstance(head, PEagleHead):
            changed.append(("mask_hidden", head.mask_hidden, 1 / self.scale))
        return changed


class BlockObjective(Eagle3Objective):
    """DFlash and DSpark: step i is a row that knows no token after the root.

    Some chains of each answer are drawn; validation takes all. The Markov head learns with the
    lm_head, given the tokens of the text. The confidence head learns how often a draft is accepted, and
    nothing else learns from it (arXiv 2607.05147, section 3).
    """

    outputs, sampled = block_outputs, 0.5


class PEagleObjective(BlockObjective):
    """P-EAGLE: the same with fewer chains at each draft step."""

    outputs, retention = p_eagle_outputs, 0.7


class Eagle1Objective(Objective):
    """EAGLE-1/2: regression of the target's next feature."""

    outputs = eagle1_outputs

    def __init__(self, target: Transformer, head: Head, steps: int | None = None, **more):
        super().__init__(target, head, 1, **more)
        self.aux_layers = ()  # it reads the normed state alone

    def loss(self, batch: Batch, states: TargetStates, scored: list[int], seeds: list[int]):
        """Return the smooth-L1 loss to the target's next feature, plus TOKEN_LOSS_WEIGHT times the
        cross-entropy with its next-token distribution, through its own lm_head (section 4.2).
        """
        read = states.normed
        if torch.is_grad_enabled():  # no noise in validation
            read = read + self._noise(batch.rows, read, seeds)
        with self.autocast():
            predicted = self.run(self.head, batch, read)
        features, weight = batch.after(states.normed), self.weights(batch, scored)
        lm_head_weight = self.head.lm_head.weight
        wanted = features[batch.teacher_index].float()
        distance = F.smooth_l1_loss(predicted.float(), wanted, reduction="none").mean(-1)
        token_loss, _, right = DraftLoss.apply(
            predicted, lm_head_weight, F.linear(features, lm_head_weight), batch.teacher_index, weight
        )
        return (distance * weight).sum() + TOKEN_LOSS_WEIGHT * token_loss, self.hits(batch, right)

    def _noise(self, rows: list[dict], state: Tensor, seeds: list[int]) -> Tensor:
        """Return noise for state [B, T, H]. Each row's is the same beside any other rows."""
        noise, scale = torch.zeros_like(state), self.scale.cpu()
        for i, (row, seed) in enumerate(zip(rows, seeds)):
            n, generator = len(row["ids"]), torch.Generator().manual_seed(seed)
            uniform = torch.rand(n, state.shape[-1], generator=generator) * 2 - 1
            noise[i, :n] = uniform * NOISE_WIDTH * scale
        return noise

    def learn_scale(self, states: TargetStates, real: Tensor) -> None:
        """Set `scale` to the root mean square of the normed features []."""
        self.scale = states.normed[real].float().pow(2).mean().sqrt()
