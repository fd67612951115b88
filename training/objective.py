"""What a head is trained to do: the losses of EAGLE-3, of Medusa and Hydra, and of EAGLE-1.

All are means over the predictions of a whole optimizer step, computed as weighted sums over its parts: the
gradient is the same however a step is split into smaller batches or over processes.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.compiling import compile_graph
from model import Block, Transformer, rope_table
from networks.eagle import Eagle1Head, Eagle3Head
from networks.head import Head, HeadArgs
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads
from training.batches import Batch
from tree import pick

DECAY = 0.8  # weight of draft step i is DECAY**i (SafeAILab/EAGLE traineagle3)
TOKEN_LOSS = 0.1  # weight of EAGLE-1's token loss beside its regression (arXiv 2401.15077, section 4.2)


class Drafted:
    """Attention of chains drafted behind the positions `at` [B, R] of a text [B, T]: a chain's step-i query
    sees the text up to its position, as the head read it at step 0, then its own keys of steps 1..i. No tree
    and no second sequence is laid out.
    """

    def __init__(self, layer: Block, args: HeadArgs, inv_freq: Tensor, inputs: Tensor, at: Tensor):
        self.layer, self.args, self.inv_freq, self.at = layer, args, inv_freq, at
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        q, k, v = self._heads(inputs, positions[None])
        self.query = pick(q, at)  # of step 0 [B, R, nh, hd]
        # [B, nkv, 1, hd, T], [.., T, hd].
        self.k, self.v = k.permute(0, 2, 3, 1)[:, :, None], v.transpose(1, 2)[:, :, None]
        # [B, 1, 1, R, T].
        self.hidden = torch.where(positions <= at[..., None], 0.0, float("-inf"))[:, None, None]
        self.own: list[tuple[Tensor, Tensor]] = []

    def _heads(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return self.layer.split(
            self.layer.heads(self.layer.wqkv(inputs), *rope_table(self.args, self.inv_freq, positions))
        )

    def step(self, inputs: Tensor, number: int) -> Tensor:
        """Inputs [B, R, ...] of step `number` >= 1 -> attention output [B, R, nh*hd]."""
        q, k, v = self._heads(inputs, self.at + number)
        self.own.append((k.transpose(1, 2)[:, :, None], v.transpose(1, 2)[:, :, None]))  # [B, nkv, 1, R, hd]
        return self.attend(q)

    def attend(self, query: Tensor) -> Tensor:
        """query [B, R, nh, hd] -> [B, R, nh*hd]."""
        (B, R, nh, hd), nkv, T = query.shape, self.args.num_kv_heads, self.k.shape[-1]
        grouped = query.transpose(1, 2).reshape(B, nkv, nh // nkv, R, hd) * hd**-0.5
        scores = [grouped @ self.k + self.hidden]
        scores += [(grouped * k).sum(-1, keepdim=True) for k, _ in self.own]
        weights = torch.cat([s.float() for s in scores], dim=-1).softmax(-1).to(self.v.dtype)
        out = weights[..., :T] @ self.v
        for i, (_, v) in enumerate(self.own):
            out = out + weights[..., T + i, None] * v
        return out.reshape(B, nh, R, hd).transpose(1, 2).flatten(2)


class SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of an lm_head's logits with a teacher's distribution, weighted and summed, a block of
    rows at a time.

    Logits are as large as the vocabulary and would be written and read a dozen times; here a block of them
    stays in the cache until its loss, its choices and its gradients are done. The gradients are computed with
    the loss, so `weight` [M] must be what the loss of each row counts in the end. x [M, H] with head [V, H];
    row i is taught by the logits teacher[places[i]], of teacher [N, V]. Returns (weighted sum [], choices [M]
    without gradient).
    """

    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, teacher: Tensor, places: Tensor, weight: Tensor):
        learns, M, dtype = any(ctx.needs_input_grad), x.shape[0], teacher.dtype
        given, x, w = x.dtype, x.to(dtype), head.to(dtype)
        losses, choices = x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.int64)
        slopes = x.new_empty(M, head.shape[0]) if learns else None  # of the logits
        block = 128 if x.device.type == "cpu" else 4096
        for i in range(0, x.shape[0], block):
            at = slice(i, i + block)
            logits, label = F.linear(x[at], w).float(), teacher[places[at]].float().softmax(-1)
            choices[at] = logits.argmax(-1)
            losses[at] = logits.logsumexp(-1) - torch.linalg.vecdot(logits, label)
            if learns:
                slopes[at] = torch.softmax(logits, -1, out=logits).sub_(label).mul_(weight[at, None])
        dx = (slopes @ w).to(given) if ctx.needs_input_grad[0] else None
        dw = (slopes.T @ x).to(head.dtype) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(choices)
        return (losses * weight).sum(), choices

    @staticmethod
    def backward(ctx, slope: Tensor, _):
        return *(None if d is None else d * slope for d in ctx.saved_tensors), None, None, None


def unrolled(head: Eagle3Head, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Training-time test (arXiv 2503.01840, section 3.2): the head drafts on its own outputs.

    features [B, T, F] -> what its lm_head reads at every scored prediction [M, H].
    """
    layer, at, tokens = head.layer, batch.at, batch.tokens
    T = tokens.shape[1]
    inputs, residual = layer.inputs(head.embed(tokens.roll(-1, 1)), head.fuse(features))
    drafted = Drafted(layer, head.args, head.inv_freq, inputs, at)
    attended = drafted.attend(drafted.query)
    feature = residual = pick(residual, at)  # of step 0; later steps start from the head's own output
    drafts = []
    for step in range(steps):
        if step:
            inputs, residual = layer.inputs(
                head.embed(tokens.gather(1, (at + 1 + step).clamp(max=T - 1))), feature
            )
            attended = drafted.step(inputs, step)
        feature = layer.finish(residual, attended)
        drafts.append(feature)
    return head.norm(torch.cat([x.flatten(0, 1) for x in drafts])[batch.index])


def regressed(head: Eagle1Head, batch: Batch, feature: Tensor) -> Tensor:
    """EAGLE-1's guess at the target's next feature: features [B, T, H] after the final norm -> guesses [M,
    H].
    """
    layer, at = head.layer, batch.at
    x = head.fc(torch.cat((head.embed(batch.tokens.roll(-1, 1)), feature), dim=-1))
    drafted = Drafted(layer, head.args, head.inv_freq, x, at)
    return layer.finish(pick(x, at), drafted.attend(drafted.query)).flatten(0, 1)[batch.index]


def guessed(head: MedusaHeads | HydraHeads, batch: Batch, state: Tensor, steps: int) -> Tensor:
    """All guesses of Medusa or Hydra heads at once: normed states [B, T, H] -> what the lm_head reads [M, H].
    """
    at, tokens = batch.at, batch.tokens
    if isinstance(head, MedusaHeads):
        outputs = head.outputs(pick(state, at))[:steps]
    else:
        if head.prefix_layer is not None:
            layer = head.prefix_layer
            drafted = Drafted(layer, head.args, head.inv_freq, layer.attn_norm(state), at)
            p = head.prefix_norm(layer.finish(pick(state, at), drafted.attend(drafted.query)))
        else:
            p = pick(state, at)
        # Root, drafted, ...
        ahead = [tokens.gather(1, (at + 1 + i).clamp(max=tokens.shape[1] - 1)) for i in range(steps)]
        outputs = [head.output(p, torch.stack(ahead[: i + 1], -1)) for i in range(steps)]
    return torch.cat([x.flatten(0, 1) for x in outputs])[batch.index]


class Objective:
    """A head, its loss on a batch, and what is written at the end.

    `scale`: of what the head reads, see `learn_scale`. `decay`: weight of draft step i is decay**i.
    """

    decay = 1.0

    def __init__(self, target: Transformer, head: Head, steps: int):
        self.target, self.head, self.steps = target, head, steps
        self.device, self.dtype = target.embed.weight.device, target.embed.weight.dtype
        self.in_draft = torch.zeros(
            head.args.vocab_size, dtype=torch.bool
        ).index_fill_(0, head.draft_ids.cpu(), True)
        self.aux_layers = head.args.aux_layers  # which states of the target the loss reads
        self.scale = torch.ones((), device=self.device)

    def batch(self, rows: list[dict], steps: int) -> Batch:
        """Rows as a batch on the device."""
        return Batch(rows, steps, self.in_draft, self.device)

    def autocast(self):
        """bfloat16 products where the target is in bfloat16; the head's weights are float32."""
        return torch.autocast(
            self.device.type, torch.bfloat16
        ) if self.dtype == torch.bfloat16 else nullcontext()

    def weights(self, batch: Batch, scored: list[int]) -> Tensor:
        """What the loss of each prediction of a batch counts [M], where `scored` are all those of the
        optimizer step.
        """
        share = torch.tensor([self.decay**i / max(1, n) for i, n in enumerate(scored)], device=self.device)
        return share[batch.step]

    def following(self, batch: Batch, said: Tensor) -> Tensor:
        """What the target says [B, T, ...] one token behind each position [B*R, ...]; a prediction's is at
        `batch.shifted`.
        """
        return pick(said, (batch.at + 1).clamp(max=batch.tokens.shape[1] - 1)).flatten(0, 1)

    def hits(self, batch: Batch, choices: Tensor, greedy: Tensor) -> Tensor:
        """How many choices [M] (target ids) are the target's own, greedy [B, T], by step [steps]."""
        return batch.by_step((choices == self.following(batch, greedy)[batch.shifted]).float())

    def loss(
        self, batch: Batch, said: tuple[Tensor, Tensor, Tensor], scored: list[int], seeds: list[int]
    ) -> tuple[Tensor, Tensor]:
        """(loss [], right first choices [steps]) of a batch, of which `said` is what `read_target` says.

        `scored`: predictions of each step in the whole optimizer step, of which this may be a part; `seeds`
        are for the noise on each of its rows. A target's choice outside the draft vocabulary is a miss.
        """
        raise NotImplementedError

    def learn_scale(self, features: Tensor, state: Tensor, real: Tensor) -> None:
        """Set `scale` from what `read_target` says of some text, `real` [B, T] where there is any."""
        raise NotImplementedError

    def settings(self) -> dict:
        """What changes the loss, for telling runs apart."""
        ids = self.head.draft_ids.cpu().numpy().tobytes()
        return {
            "kind": type(self.head).__name__, "steps": self.steps,
            "draft_ids": hashlib.sha256(ids).hexdigest()
        }

    def trained(self) -> Head:
        """The head as it reads raw features, in float32."""
        return self.head.twin(self.target, torch.float32)


class Distilled(Objective):
    """Cross-entropy of a head's own lm_head with the target's distribution over the draft vocabulary."""

    decay = DECAY

    def __init__(self, target: Transformer, head: Head, steps: int, outputs: Callable, compiled: bool):
        """outputs(head, batch, what it reads, steps): what the lm_head reads at every scored prediction [M,
        H].
        """
        super().__init__(target, head, steps)
        self.lm_rows = target.lm_rows[head.draft_ids]
        self.run = compile_graph(outputs, dynamic=True) if compiled else outputs

    def reads(self, said: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What the head reads of what the target says."""
        raise NotImplementedError

    def loss(self, batch, said, scored, seeds):
        _, state, greedy = said
        with self.autocast():
            x = self.run(self.head, batch, self.reads(said), len(batch.scored))
        teacher = F.linear(self.following(batch, state), self.lm_rows)
        loss, choices = SoftCrossEntropy.apply(
            x, self.head.lm_head.weight, teacher, batch.shifted, self.weights(batch, scored)
        )
        return loss, self.hits(batch, self.head.draft_ids[choices], greedy)


class Eagle3Objective(Distilled):
    """EAGLE-3 by training-time test."""

    def __init__(self, target: Transformer, head: Eagle3Head, steps: int, compiled: bool):
        super().__init__(target, head, steps, unrolled, compiled)

    def reads(self, said):
        return (said[0] / self.scale).to(said[0].dtype)

    def learn_scale(self, features, state, real) -> None:
        """Root mean square of every feature [F].

        A target's residual stream has channels tens of times larger than the rest. Adam moves all weights at
        one pace, so `fc` learns badly from raw features; it is trained on features divided by this, and
        `trained` folds the division into its weights. The first token, an attention sink, is left out.
        """
        real = real.clone()
        real[:, 0] = False
        self.scale = features.float()[real].pow(2).mean(0).sqrt().clamp(min=1e-6)

    def trained(self):
        head = super().trained()
        head.fc.weight.data /= self.scale
        return head


class MultiTokenObjective(Distilled):
    """Medusa and Hydra: step i is guess i."""

    def __init__(self, target: Transformer, head: MedusaHeads | HydraHeads, compiled: bool):
        super().__init__(target, head, head.args.guesses, guessed, compiled)
        self.aux_layers = ()

    def reads(self, said):
        return said[1]

    def learn_scale(self, features, state, real) -> None:
        """None: what is read has been normed."""


class Eagle1Objective(Objective):
    """EAGLE-1/2: regression of the target's next feature. `noise` is the half-width of the uniform noise on
    what the head reads, in units of the features' root mean square (the paper: 0.1, of features of about that
    size).
    """

    def __init__(self, target: Transformer, head: Eagle1Head, compiled: bool, noise: float):
        super().__init__(target, head, 1)
        self.aux_layers, self.noise = (), noise
        self.run = compile_graph(regressed, dynamic=True) if compiled else regressed

    def loss(self, batch, said, scored, seeds):
        """Smooth-L1 to the target's next feature and TOKEN_LOSS times the cross-entropy with its next-token
        distribution, through its own lm_head (section 4.2).
        """
        _, state, greedy = said
        noise = torch.zeros_like(state)
        if torch.is_grad_enabled():  # none in validation
            # By row, so that it does not depend on how rows are put together.
            for i, seed in enumerate(seeds):
                generator = torch.Generator().manual_seed(seed)
                n = len(batch.rows[i]["ids"])
                noise[i, :n] = (
                    torch.rand(n, state.shape[-1], generator=generator) * 2 - 1
                ) * self.noise * self.scale.cpu()
        with self.autocast():
            guess = self.run(self.head, batch, state + noise)
        wanted, weight, rows = self.following(batch, state), self.weights(batch, scored), self.head.lm_head.weight
        regression = F.smooth_l1_loss(guess.float(), wanted[batch.shifted].float(), reduction="none").mean(-1)
        token_loss, choices = SoftCrossEntropy.apply(
            guess, rows, F.linear(wanted, rows), batch.shifted, weight
        )
        return (regression * weight).sum() + TOKEN_LOSS * token_loss, self.hits(batch, choices, greedy)

    def settings(self):
        return {**super().settings(), "noise": self.noise}

    def learn_scale(self, features, state, real) -> None:
        """Root mean square of the normed features []."""
        self.scale = state[real].float().pow(2).mean().sqrt()
