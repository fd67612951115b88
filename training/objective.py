"""What a head is trained to do: the losses of EAGLE-3, of block heads, of Medusa and Hydra, and of EAGLE-1.

All are means over the predictions of a complete optimizer step, computed as weighted sums over its parts: the
gradient is the same however a step is split into smaller batches or over processes.
"""
from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Container

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compiling import compile_graph
from model import Transformer
from networks.block import BlockHead
from networks.eagle import Eagle1Head, Eagle3Head, PEagleHead
from networks.head import Head
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads
from training.batches import Batch, Draw
from training.chains import (
    block_outputs,
    eagle1_outputs,
    eagle3_outputs,
    multi_token_outputs,
    p_eagle_outputs,
)
from training.features import TargetStates
from training.loss import DraftLoss

DECAY = 0.8  # weight of draft step i is DECAY**i (SafeAILab/EAGLE traineagle3)
Losses = tuple[tuple[str, float], ...]  # of `training.choices.LOSSES`, with what each counts
CROSS_ENTROPY: Losses = (("ce", 1.0),)
TOKEN_LOSS = 0.1  # weight of EAGLE-1's token loss beside its regression (arXiv 2401.15077, section 4.2)


class Objective:
    """A head, its loss on a batch, and the head that is written at the end.

    `aux_layers`: the layers of the target whose states the loss reads. `scale`: see `learn_scale`. `decay`:
    the weight of draft step i is decay**i. `outputs`: one of `training.chains`, run compiled if `compiled`.
    """

    decay = 1.0
    draw = Draw()  # of the chains that are trained on
    start = ""  # identity of the head that it began as, see `training.begun_head`
    taken: Container[str] = ()  # tensors that are from there

    def __init__(self, target: Transformer, head: Head, steps: int, aux_layers: tuple[int, ...],
                 outputs: Callable, compiled: bool):
        self.target, self.head, self.steps, self.aux_layers = target, head, steps, aux_layers
        self.device, self.dtype = target.embed.weight.device, target.embed.weight.dtype
        self.outputs = compile_graph(outputs, dynamic=True) if compiled else outputs
        self.in_draft = torch.zeros(head.args.vocab_size, dtype=torch.bool)
        self.in_draft[head.draft_ids.cpu()] = True
        self.scale = torch.ones((), device=self.device)

    def batch(self, rows: list[dict], steps: int, seeds: list[int] | None = None) -> Batch:
        """Rows as a batch on the device. seeds: of the chains drawn from each row; None takes all."""
        return Batch(rows, steps, self.in_draft, self.device, self.draw, seeds)

    def autocast(self):
        """A context for bfloat16 products if the target is in bfloat16; the head's weights are float32."""
        if self.dtype == torch.bfloat16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def weights(self, batch: Batch, scored: list[int]) -> Tensor:
        """What the loss of each prediction of a batch counts [M]; `scored` as in `loss`."""
        share = torch.tensor([self.decay**i / max(1, n) for i, n in enumerate(scored)], device=self.device)
        return share[batch.step]

    def hits(self, batch: Batch, choices: Tensor, greedy: Tensor) -> Tensor:
        """How many choices [M] (target ids) are the target's own, greedy [B, T], by step [steps]."""
        return batch.sum_by_step((choices == batch.after(greedy)[batch.shifted]).float())

    def loss(
        self, batch: Batch, states: TargetStates, scored: list[int], seeds: list[int]
    ) -> tuple[Tensor, Tensor]:
        """(loss [], correct first choices [steps]) of a batch with the target's states on it.

        `scored`: predictions of each step in the complete optimizer step, of which this may be a part.
        `seeds`: of the noise on each row. A target's choice outside the draft vocabulary is a miss.
        """
        raise NotImplementedError

    def learn_scale(self, states: TargetStates, real: Tensor) -> None:
        """Set `scale` from the target's states on some text; `real` [B, T] is False on padding."""
        raise NotImplementedError

    def settings(self) -> dict:
        """What changes the loss: runs that differ here are different runs."""
        ids = self.head.draft_ids.cpu().numpy().tobytes()
        digest = hashlib.sha256(ids).hexdigest()
        begun = {"start": self.start} if self.start else {}
        return {"kind": type(self.head).__name__, "steps": self.steps, "draft_ids": digest, **begun}

    def trained(self) -> Head:
        """A copy of the head that reads unscaled features, in float32."""
        return self.head.twin(self.target, torch.float32)


class Distillation(Objective):
    """A head's guesses, through its lm_head, against the target's distribution over the draft vocabulary.

    losses: those of `training.loss` with what each counts.
    """

    decay = DECAY

    def __init__(self, target: Transformer, head: Head, *args, losses: Losses = CROSS_ENTROPY):
        super().__init__(target, head, *args)
        self.lm_rows = target.lm_rows[head.draft_ids]
        self.losses = losses

    def reads(self, states: TargetStates) -> Tensor:
        """What the head reads of the target's states."""
        raise NotImplementedError

    def loss(self, batch, states, scored, seeds):
        with self.autocast():
            x = self.outputs(self.head, batch, self.reads(states), len(batch.scored))
        teacher = F.linear(batch.after(states.normed), self.lm_rows)
        weight, rows, lm_head = self.weights(batch, scored), x, self.head.lm_head.weight
        if getattr(self.head.args, "markov_rank", 0):  # one product with both: their sum is what counts
            with self.autocast():
                reads = self.head.markov_reads(rows, batch.before())
            x = torch.cat((rows, reads.to(rows.dtype)), -1)
            lm_head = torch.cat((lm_head, self.head.markov_out.weight), -1)
        loss, choices, accepted = DraftLoss.apply(x, lm_head, teacher, batch.shifted, weight, self.losses)
        if getattr(self.head.args, "confidence", False):
            with self.autocast():
                doubt = self.head.doubt(rows, batch.before())
            errors = F.binary_cross_entropy_with_logits(doubt, accepted, reduction="none")
            loss = loss + (errors * weight).sum()
        return loss, self.hits(batch, self.head.draft_ids[choices], states.greedy)

    def settings(self):
        return {**super().settings(), "losses": str(self.losses)}


class Eagle3Objective(Distillation):
    """EAGLE-3 by training-time test."""

    def __init__(
        self, target: Transformer, head: Eagle3Head, steps: int, compiled: bool,
        losses: Losses = CROSS_ENTROPY, outputs: Callable = eagle3_outputs,
    ):
        super().__init__(target, head, steps, head.args.aux_layers, outputs, compiled, losses=losses)

    def reads(self, states):
        return (states.features / self.scale).to(states.features.dtype)

    def learn_scale(self, states, real) -> None:
        """Root mean square of every feature [F].

        A target's residual stream has channels tens of times larger than the rest. Adam moves all weights at
        one pace, so `fc` learns badly from raw features. It is trained on features divided by this scale, and
        `trained` folds the division into its weights. The first token, an attention sink, is left out.
        """
        if getattr(self.head, "fc_norms", None):
            return  # what `fc` reads is normed
        real = real.clone()
        real[:, 0] = False
        self.scale = states.features.float()[real].pow(2).mean(0).sqrt().clamp(min=1e-6)
        if "fc.weight" in self.taken:  # from a head that reads unscaled features
            self.head.fc.weight.data *= self.scale

    def trained(self):
        head = super().trained()
        head.fc.weight.data /= self.scale
        return head


class BlockObjective(Eagle3Objective):
    """P-EAGLE, DFlash and DSpark: step i is a row that knows no token after the root.

    Of each answer some chains are drawn, see `Draw`; in validation there are all. The Markov head learns with
    the lm_head, given the tokens of the text. The confidence head learns how often a draft is accepted, and
    nothing else learns from it (arXiv 2607.05147, section 3).
    """

    def __init__(
        self, target: Transformer, head: BlockHead | PEagleHead, compiled: bool,
        losses: Losses = CROSS_ENTROPY, draw: Draw = Draw(),
    ):
        outputs = p_eagle_outputs if isinstance(head, PEagleHead) else block_outputs
        super().__init__(target, head, head.args.drafts, compiled, losses, outputs)
        self.draw = draw

    def learn_scale(self, states, real):
        super().learn_scale(states, real)
        if "mask_hidden" in self.taken:
            self.head.mask_hidden.data /= self.scale

    def trained(self):
        head = super().trained()
        if isinstance(head, PEagleHead):
            head.mask_hidden.data *= self.scale
        return head

    def settings(self):
        return {**super().settings(), "draw": str(self.draw)}


class MultiTokenObjective(Distillation):
    """Medusa and Hydra: guess i is step i."""

    def __init__(
        self, target: Transformer, head: MedusaHeads | HydraHeads, compiled: bool,
        losses: Losses = CROSS_ENTROPY,
    ):
        super().__init__(target, head, head.args.guesses, (), multi_token_outputs, compiled, losses=losses)

    def reads(self, states):
        return states.normed

    def learn_scale(self, states, real) -> None:
        """No scale: the final norm has been applied to what is read."""


class Eagle1Objective(Objective):
    """EAGLE-1/2: regression of the target's next feature.

    `noise` is the half-width of the uniform noise on what the head reads, in units of the features' root mean
    square (the paper: 0.1, on features of about that size).
    """

    def __init__(self, target: Transformer, head: Eagle1Head, compiled: bool, noise: float):
        super().__init__(target, head, 1, (), eagle1_outputs, compiled)
        self.noise = noise

    def loss(self, batch, states, scored, seeds):
        """Smooth-L1 loss to the target's next feature, plus TOKEN_LOSS times the cross-entropy with its
        next-token distribution, through its own lm_head (section 4.2).
        """
        read = states.normed
        if torch.is_grad_enabled():  # no noise in validation
            read = read + self._noise(batch.rows, read, seeds)
        with self.autocast():
            guess = self.outputs(self.head, batch, read)
        features, weight = batch.after(states.normed), self.weights(batch, scored)
        lm_rows = self.head.lm_head.weight
        distance = F.smooth_l1_loss(guess.float(), features[batch.shifted].float(), reduction="none").mean(-1)
        token_loss, choices, _ = DraftLoss.apply(
            guess, lm_rows, F.linear(features, lm_rows), batch.shifted, weight
        )
        return (distance * weight).sum() + TOKEN_LOSS * token_loss, self.hits(batch, choices, states.greedy)

    def _noise(self, rows: list[dict], state: Tensor, seeds: list[int]) -> Tensor:
        """Noise for state [B, T, H]: each row's is the same beside any other rows."""
        noise, scale = torch.zeros_like(state), self.scale.cpu()
        for i, (row, seed) in enumerate(zip(rows, seeds)):
            n, generator = len(row["ids"]), torch.Generator().manual_seed(seed)
            uniform = torch.rand(n, state.shape[-1], generator=generator) * 2 - 1
            noise[i, :n] = uniform * self.noise * scale
        return noise

    def settings(self):
        return {**super().settings(), "noise": self.noise}

    def learn_scale(self, states, real) -> None:
        """Root mean square of the normed features []."""
        self.scale = states.normed[real].float().pow(2).mean().sqrt()
