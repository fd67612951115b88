"""Losses over a large vocabulary, and the objective of each kind of head.

All are means over the predictions of a complete optimizer step, computed as weighted sums over its parts: the
gradient is the same however a step is split into smaller batches or over processes.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.folder import weights_fingerprint
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
    acceptance = torch.minimum(p, q).sum(-1)
    loss, gradient = lse[:, 0] - torch.linalg.vecdot(logits, p), q - p
    if lk:
        loss = torch.lerp(loss, -acceptance.log(), lk)
        q_below_p = q * (q < p)
        gradient.lerp_((q * q_below_p.sum(-1, keepdim=True) - q_below_p) / acceptance[:, None], lk)
    return loss, gradient, acceptance


class DraftLoss(torch.autograd.Function):
    """A loss of an lm_head's logits, weighted and summed.

    Logits are large: autograd would write and read them a dozen times. Here they are
    computed in blocks of rows, which bounds temporaries. The gradients are computed with the
    loss, so `weight`, the weight of each row's loss, must be final.

    x [M, H], lm_head [V, H], teacher's logits [N, V], weight [M]. Row i learns from teacher[index[i]].
    Returns the weighted sum [] and, without gradient, the acceptance rate sum_x min(p_x, q_x) [M] and whether
    the top-1 token is the teacher's [M], 1.0 or 0.0.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, lm_head: Tensor, teacher: Tensor, index: Tensor, weight: Tensor, lk: float = 0.0
    ):
        needs_x, needs_head = ctx.needs_input_grad[:2]
        M, x_dtype = x.shape[0], x.dtype
        x, w = x.to(teacher.dtype), lm_head.to(teacher.dtype)
        losses, acceptance, correct = x.new_empty(3, M, dtype=torch.float32)
        dlogits = x.new_empty(M, lm_head.shape[0]) if needs_x or needs_head else None
        block = 128 if x.device.type == "cpu" else 4096
        for i in range(0, M, block):
            rows = slice(i, i + block)
            logits, p = F.linear(x[rows], w).float(), teacher[index[rows]].float().softmax(-1)
            correct[rows] = (logits.argmax(-1) == p.argmax(-1)).float()
            losses[rows], gradient, acceptance[rows] = row_loss(logits, p, lk)
            if dlogits is not None:
                dlogits[rows] = gradient.mul_(weight[rows, None])
        dx = (dlogits @ w).to(x_dtype) if needs_x else None
        dw = (dlogits.T @ x).to(lm_head.dtype) if needs_head else None
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(acceptance, correct)
        return (losses * weight).sum(), acceptance, correct

    @staticmethod
    def backward(ctx, dloss: Tensor, *_):
        return *(None if d is None else d * dloss for d in ctx.saved_tensors), None, None, None, None


class Objective:
    """A head, its loss on a batch, and the head that is written at the end.

    lk: weight of the acceptance loss, see `row_loss`. start: the head that this one was initialized from, if
    any. aux_layers: the target's layers whose states the loss reads. Each kind has two methods:

    learn_scale(states, real) sets `scale`, which divides features, from the target's states on sample rows;
    real [B, T]: False on padding.

    loss(batch, states, scored, seeds) returns (loss [], number of correct top-1 tokens [steps]) of a batch
    with the target's states on it. The batch may be a micro-batch: `scored` is the number of predictions of
    each draft step in the whole optimizer step. seeds: of the noise on each row. A top-1 token is correct if
    it is the target's top-1 among the draft ids. A training token outside the draft ids counts as wrong.
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

    def hits(self, batch: Batch, correct: Tensor) -> Tensor:
        """Sum the correct predictions [M] of `DraftLoss` by draft step [steps]."""
        return correct.new_zeros(len(batch.scored)).index_add(0, batch.step, correct)

    def settings(self) -> dict:
        """Return the settings that change the loss. A resumed run must have the same."""
        start = weights_fingerprint(self.start) if self.start else ""
        return {"kind": type(self.head).__name__, "steps": self.steps, "lk": self.lk, "start": start,
                "draft_ids": digest(self.head.draft_ids.tolist())}

    def trained(self) -> Head:
        """Return a copy of the head that reads unscaled features, in float32."""
        return copy_head(self.head, self.target, torch.float32)


class Eagle3Objective(Objective):
    """EAGLE-3 by training-time test: the loss compares distributions over the draft vocabulary."""

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
        weight, hidden, lm_head = self.weights(batch, scored), x, self.head.lm_head.weight
        if getattr(args, "markov_rank", 0):  # logits = lm_head(hidden) + markov_out(...), in one product
            with self.autocast():
                markov_input = self.head.markov_input(hidden, batch.previous_tokens())
            x = torch.cat((hidden, markov_input.to(hidden.dtype)), -1)
            lm_head = torch.cat((lm_head, self.head.markov_out.weight), -1)
        loss, accepted, correct = DraftLoss.apply(x, lm_head, teacher, batch.teacher_index, weight, self.lk)
        if getattr(args, "confidence", False):
            with self.autocast():
                logits = self.head.confidence_logit(hidden, batch.previous_tokens())
            confidence_loss = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
            loss = loss + (confidence_loss * weight).sum()
        return loss, self.hits(batch, correct)

    def learn_scale(self, states: TargetStates, real: Tensor) -> None:
        """Set `scale` to the root mean square of every feature [F].

        A target's residual stream has channels tens of times larger than the rest. Adam updates all weights
        at the same rate, so `fc` learns badly from raw features. It is trained on features divided by this
        scale, and `trained` folds the division into its weights. The first token, an attention sink, is
        excluded.
        """
        if getattr(self.head, "fc_norms", None):
            return  # `fc` reads normed features
        real = real.clone()
        real[:, 0] = False
        self.scale = states.features.float()[real].pow(2).mean(0).sqrt().clamp(min=1e-6)
        initialized = own_state(self.start) if self.start else ()
        for name, p, factor in self._scaled(self.head):
            if name in initialized:  # `start` reads unscaled features
                p.data *= factor

    def trained(self):
        head = super().trained()
        for _, p, factor in self._scaled(head):
            p.data /= factor
        return head

    def _scaled(self, head: Head) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, weight, factor) of the weights of a head that `scale` changes."""
        scaled = [("fc.weight", head.fc.weight, self.scale)]
        if isinstance(head, PEagleHead):
            scaled.append(("mask_hidden", head.mask_hidden, 1 / self.scale))
        return scaled


class BlockObjective(Eagle3Objective):
    """DFlash and DSpark: all draft steps are predicted in one pass, from the root and mask tokens.

    Training samples the chains of each answer; validation uses all. The Markov head is trained with the
    lm_head, on the previous tokens of the training data. The confidence head is trained to predict the
    acceptance rate; its inputs are detached (arXiv 2607.05147, section 3).
    """

    outputs, sampled = block_outputs, 0.5


class PEagleObjective(BlockObjective):
    """P-EAGLE: as `BlockObjective`, with fewer chains at each further draft step."""

    outputs, retention = p_eagle_outputs, 0.7


class Eagle1Objective(Objective):
    """EAGLE-1/2: regression to the target's next feature."""

    outputs = eagle1_outputs

    def __init__(self, target: Transformer, head: Head, steps: int | None = None, **more):
        super().__init__(target, head, 1, **more)
        self.aux_layers = ()  # it reads the normed state alone

    def loss(self, batch: Batch, states: TargetStates, scored: list[int], seeds: list[int]):
        """Return the smooth-L1 loss to the target's next feature, plus TOKEN_LOSS_WEIGHT times the
        cross-entropy with its next-token distribution, through its own lm_head (section 4.2).
        """
        inputs = states.normed
        if torch.is_grad_enabled():  # no noise in validation
            inputs = inputs + self._noise(batch.rows, inputs, seeds)
        with self.autocast():
            predicted = self.run(self.head, batch, inputs)
        features, weight = batch.after(states.normed), self.weights(batch, scored)
        lm_head_weight = self.head.lm_head.weight
        expected = features[batch.teacher_index].float()
        regression = F.smooth_l1_loss(predicted.float(), expected, reduction="none").mean(-1)
        token_loss, _, correct = DraftLoss.apply(
            predicted, lm_head_weight, F.linear(features, lm_head_weight), batch.teacher_index, weight
        )
        return (regression * weight).sum() + TOKEN_LOSS_WEIGHT * token_loss, self.hits(batch, correct)

    def _noise(self, rows: list[dict], state: Tensor, seeds: list[int]) -> Tensor:
        """Return noise for state [B, T, H]. A row's noise does not depend on the other rows of the batch."""
        noise, scale = torch.zeros_like(state), self.scale.cpu()
        for i, (row, seed) in enumerate(zip(rows, seeds)):
            n, rng = len(row["ids"]), torch.Generator().manual_seed(seed)
            uniform = torch.rand(n, state.shape[-1], generator=rng) * 2 - 1
            noise[i, :n] = uniform * NOISE_WIDTH * scale
        return noise

    def learn_scale(self, states: TargetStates, real: Tensor) -> None:
        """Set `scale` to the root mean square of the normed features []."""
        self.scale = states.normed[real].float().pow(2).mean().sqrt()
