"""Unroll heads over training sequences: chains of draft steps start at many positions at once.

Every function returns the lm_head inputs of the predictions with a loss in a `Batch` [M, H].
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from head import Eagle1Head, Eagle3Head, Head
from model import Block, rope_table
from networks.block import BlockHead
from networks.p_eagle import PEagleHead
from training.batches import Batch
from tree import gather_tokens


class ChainAttention:
    """Attention of chains that start at the positions `starts` [B, R] of sequences [B, T].

    At step i a chain attends to the sequence up to its start, with the keys of step 0, and to its own keys of
    steps 1..i.
    """

    def __init__(self, head: Head, layer: Block, inputs: Tensor, starts: Tensor):
        """inputs [B, T, ...]: the layer's inputs for the sequence."""
        self.layer, self.args, self.inv_freq, self.starts = layer, head.args, head.inv_freq, starts
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        q, k, v = self._heads(inputs, positions[None])
        self.queries = q  # [B, T, nh, hd]
        # [B, nkv, 1, hd, T] and [B, nkv, 1, T, hd]
        self.k, self.v = k.permute(0, 2, 3, 1)[:, :, None], v.transpose(1, 2)[:, :, None]
        self.positions = positions
        self.own: list[tuple[Tensor, Tensor]] = []  # keys and values of the later steps, [B, nkv, 1, R, hd]

    def _heads(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = rope_table(self.args, self.inv_freq, positions)
        return self.layer.split(self.layer.norm_and_rotate(self.layer.project(inputs), cos, sin))

    def mask(self, step: int = 0) -> Tensor:
        """Return the additive mask [B, 1, 1, R, T] over the sequence at a step of the chains."""
        start, window = self.starts[..., None], self.layer.window
        visible = self.positions <= start
        if window:
            visible = visible & (self.positions > start + step - window)
        return torch.where(visible, 0.0, float("-inf"))[:, None, None]

    def first_step(self) -> Tensor:
        """Return the attention output of step 0 [B, R, nh*hd]. Call it before any other step."""
        return self._attend(gather_tokens(self.queries, self.starts), self.mask())

    def sequence(self) -> Tensor:
        """Return the causal attention output of all positions [B, T, nh*hd]."""
        T = self.queries.shape[1]
        visible = torch.ones(T, T, dtype=torch.bool, device=self.queries.device).tril()
        if self.layer.window:
            visible = visible.triu(1 - self.layer.window)
        mask = torch.where(visible, 0.0, float("-inf"))
        return self._attend(self.queries, mask)

    def step(self, inputs: Tensor, number: int) -> Tensor:
        """Return the attention output of the first R' chains at step `number` >= 1 [B, R', nh*hd].

        inputs [B, R', ...]: the layer's inputs. No step has more chains than the previous one.
        """
        q, k, v = self._heads(inputs, self.starts[:, : inputs.shape[1]] + number)
        self.own.append((k.transpose(1, 2)[:, :, None], v.transpose(1, 2)[:, :, None]))
        return self._attend(q, self.mask(number))

    def _attend(self, query: Tensor, mask: Tensor) -> Tensor:
        (B, R, nh, hd), nkv, T = query.shape, self.args.num_kv_heads, self.k.shape[-1]
        grouped = query.transpose(1, 2).reshape(B, nkv, nh // nkv, R, hd) * hd**-0.5
        scores = [grouped @ self.k + mask[..., :R, :]]
        scores += [(grouped * k[..., :R, :]).sum(-1, keepdim=True) for k, _ in self.own]
        weights = torch.cat([s.float() for s in scores], dim=-1).softmax(-1).to(self.v.dtype)
        out = weights[..., :T] @ self.v
        for i, (_, v) in enumerate(self.own):
            out = out + weights[..., T + i, None] * v[..., :R, :]
        return out.reshape(B, nh, R, hd).transpose(1, 2).flatten(2)


def eagle3_outputs(head: Eagle3Head, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Run training-time test (arXiv 2503.01840, section 3.2): the head drafts on its own outputs.

    features: the target's [B, T, F].
    """
    layer = head.layer
    inputs, residual = layer.inputs(head.embed(batch.tokens.roll(-1, 1)), head.fuse(features))
    chains = ChainAttention(head, layer, inputs, batch.starts)
    drafts = [layer.finish(gather_tokens(residual, batch.starts), chains.first_step())]
    for step in range(1, steps):  # each step reads the head's output of the previous step
        inputs, residual = layer.inputs(head.embed(batch.input_tokens(step)), drafts[-1])
        drafts.append(layer.finish(residual, chains.step(inputs, step)))
    return head.norm(_scored(drafts, batch))


def eagle1_outputs(head: Eagle1Head, batch: Batch, feature: Tensor) -> Tensor:
    """Predict the target's next feature, as EAGLE-1 does. feature [B, T, H]: after the final norm."""
    x = head.fc(torch.cat((head.embed(batch.tokens.roll(-1, 1)), feature), dim=-1))
    chains = ChainAttention(head, head.layer, x, batch.starts)
    return _scored([head.layer.finish(gather_tokens(x, batch.starts), chains.first_step())], batch)


class BlockAttention(ChainAttention):
    """Attention of chains whose steps are computed together.

    Each step attends to the sequence, and to the steps of its chain that are `visible` [K, K].
    """

    def __init__(self, head: Head, layer: Block, inputs: Tensor, starts: Tensor, visible: Tensor):
        super().__init__(head, layer, inputs, starts)
        if layer.window:
            visible = visible.tril().triu(1 - layer.window)
        self.step_mask = torch.where(visible, 0.0, float("-inf"))

    def block(self, inputs: Tensor, first: int) -> Tensor:
        """Return the attention output of the steps first ... first + K - 1 [B, R, K, nh*hd].

        inputs [B, R, K, ...]: the layer's inputs.
        """
        B, R, K = inputs.shape[:3]
        positions = self.starts[..., None] + first + torch.arange(K, device=inputs.device)
        q, k, v = self._heads(inputs.flatten(1, 2), positions.flatten(1))
        (nh, hd), nkv, T = q.shape[2:], self.args.num_kv_heads, self.k.shape[-1]
        q = q.transpose(1, 2).reshape(B, nkv, nh // nkv, R, K, hd) * hd**-0.5
        k, v = (x.transpose(1, 2).reshape(B, nkv, 1, R, K, hd) for x in (k, v))
        mask = torch.stack([self.mask(first + i) for i in range(K)], -2)  # [B, 1, 1, R, K, T]
        sequence_scores = (q.flatten(3, 4) @ self.k).unflatten(3, (R, K)) + mask
        step_scores = q @ k.transpose(-1, -2) + self.step_mask
        weights = torch.cat((sequence_scores.float(), step_scores.float()), -1).softmax(-1).to(self.v.dtype)
        out = (weights[..., :T].flatten(3, 4) @ self.v).unflatten(3, (R, K)) + weights[..., T:] @ v
        return out.reshape(B, nh, R, K, hd).permute(0, 2, 3, 1, 4).flatten(3)


def block_outputs(head: BlockHead, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Run DFlash's and DSpark's blocks: each starts with the token after a start position.

    features: the target's [B, T, F].
    """
    context, anchors, size = head.fuse(features), batch.input_tokens(0), head.args.block
    x = head.block_inputs(anchors)  # [B, C, block, H]
    visible = torch.ones(size, size, dtype=torch.bool, device=x.device)
    visible = visible.tril() if head.args.causal else visible
    for layer in head.layers:
        chains = BlockAttention(head, layer, context, batch.starts, visible)
        x = layer.finish(x, chains.block(layer.attn_norm(x), 1))
    outputs = head.norm(head.draft_rows(x))
    return _scored([outputs[:, :, i] for i in range(steps)], batch)


def p_eagle_outputs(head: PEagleHead, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Run P-EAGLE: the sequence, and after each start position a mask token for each further draft step.

    features: the target's [B, T, F].
    """
    x, next_tokens = head.fuse(features), head.embed(batch.tokens.roll(-1, 1))
    mask = torch.full_like(batch.starts, head.args.mask_id)
    mask_feature = head.fuse(head.mask_hidden[None, None]).expand(*batch.starts.shape, -1)
    drafts = [mask_feature[:, :count] for count in batch.chains[1:]]  # by draft step: residual streams
    layers = [head.layer, *head.more_layers]
    for layer in layers:
        if layer is head.layer:
            inputs, x = layer.inputs(next_tokens, x)
            pairs = [layer.inputs(head.embed(mask[:, : h.shape[1]]), h) for h in drafts]
        else:
            inputs, pairs = x, [(h, h) for h in drafts]
        chains = ChainAttention(head, layer, inputs, batch.starts)
        if layer is layers[-1]:  # only the start positions
            x = layer.finish(gather_tokens(x, batch.starts), chains.first_step())
        else:
            x = layer.finish(x, chains.sequence())
        drafts = [layer.finish(h, chains.step(inputs, step)) for step, (inputs, h) in enumerate(pairs, 1)]
    padded = [F.pad(h, (0, 0, 0, batch.starts.shape[1] - h.shape[1])) for h in (x, *drafts)]
    return head.norm(_scored(padded, batch))


def _scored(outputs: list[Tensor], batch: Batch) -> Tensor:
    """Select the scored predictions [M, H] from the outputs [B, R, H] of every step."""
    return torch.cat([x.flatten(0, 1) for x in outputs])[batch.index]
