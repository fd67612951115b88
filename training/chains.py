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
    """Attention of chains that start at the positions `at` [B, R] of sequences [B, T].

    At step i a chain attends to the sequence up to its position, with the keys of step 0, and to its own keys
    of steps 1..i.
    """

    def __init__(self, head: Head, layer: Block, inputs: Tensor, at: Tensor):
        """inputs [B, T, ...]: the layer's inputs for the sequence."""
        self.layer, self.args, self.inv_freq, self.at = layer, head.args, head.inv_freq, at
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
        at, window = self.at[..., None], self.layer.window
        visible = self.positions <= at
        if window:
            visible = visible & (self.positions > at + step - window)
        return torch.where(visible, 0.0, float("-inf"))[:, None, None]

    def first(self) -> Tensor:
        """Return the attention output of step 0 [B, R, nh*hd]. Call it before any other step."""
        return self._attend(gather_tokens(self.queries, self.at), self.mask())

    def text(self) -> Tensor:
        """Return the causal attention output of all positions [B, T, nh*hd]."""
        T = self.queries.shape[1]
        near = torch.ones(T, T, dtype=torch.bool, device=self.queries.device).tril()
        if self.layer.window:
            near = near.triu(1 - self.layer.window)
        mask = torch.where(near, 0.0, float("-inf"))
        return self._attend(self.queries, mask)

    def step(self, inputs: Tensor, number: int) -> Tensor:
        """Return the attention output of the first R' chains at step `number` >= 1 [B, R', nh*hd].

        inputs [B, R', ...]: the layer's inputs. No step has more chains than the previous one.
        """
        q, k, v = self._heads(inputs, self.at[:, : inputs.shape[1]] + number)
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
    drafts = [layer.finish(gather_tokens(residual, batch.starts), chains.first())]
    for step in range(1, steps):  # each step reads the head's output of the previous step
        inputs, residual = layer.inputs(head.embed(batch.following(step)), drafts[-1])
        drafts.append(layer.finish(residual, chains.step(inputs, step)))
    return head.norm(_scored(drafts, batch))


def eagle1_outputs(head: Eagle1Head, batch: Batch, feature: Tensor) -> Tensor:
    """Predict the target's next feature, as EAGLE-1 does. feature [B, T, H]: after the final norm."""
    x = head.fc(torch.cat((head.embed(batch.tokens.roll(-1, 1)), feature), dim=-1))
    chains = ChainAttention(head, head.layer, x, batch.starts)
    return _scored([head.layer.finish(gather_tokens(x, batch.starts), chains.first())], batch)


class BlockAttention(ChainAttention):
    """Attention of chains whose steps are computed together.

    Each step attends to the sequence, and to the steps of its chain that `sees` [K, K] allows.
    """

    def __init__(self, head: Head, layer: Block, inputs: Tensor, at: Tensor, sees: Tensor):
        super().__init__(head, layer, inputs, at)
        if layer.window:
            sees = sees.tril().triu(1 - layer.window)
        self.sees = torch.where(sees, 0.0, float("-inf"))

    def block(self, inputs: Tensor, first: int) -> Tensor:
        """Return the attention output of the steps first ... first + K - 1 [B, R, K, nh*hd].

        inputs [B, R, K, ...]: the layer's inputs.
        """
        B, R, K = inputs.shape[:3]
        positions = self.at[..., None] + first + torch.arange(K, device=inputs.device)
        q, k, v = self._heads(inputs.flatten(1, 2), positions.flatten(1))
        (nh, hd), nkv, T = q.shape[2:], self.args.num_kv_heads, self.k.shape[-1]
        q = q.transpose(1, 2).reshape(B, nkv, nh // nkv, R, K, hd) * hd**-0.5
        k, v = (x.transpose(1, 2).reshape(B, nkv, 1, R, K, hd) for x in (k, v))
        mask = torch.stack([self.mask(first + i) for i in range(K)], -2)  # [B, 1, 1, R, K, T]
        text = (q.flatten(3, 4) @ self.k).unflatten(3, (R, K)) + mask
        own = q @ k.transpose(-1, -2) + self.sees
        weights = torch.cat((text.float(), own.float()), -1).softmax(-1).to(self.v.dtype)
        out = (weights[..., :T].flatten(3, 4) @ self.v).unflatten(3, (R, K)) + weights[..., T:] @ v
        return out.reshape(B, nh, R, K, hd).permute(0, 2, 3, 1, 4).flatten(3)


def block_outputs(head: BlockHead, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Run DFlash's and DSpark's blocks, which begin with the token after each position.

    features: the target's [B, T, F].
    """
    context, anchors, size = head.fuse(features), batch.following(0), head.args.block
    x = head.block_inputs(anchors)  # [B, C, block, H]
    sees = torch.ones(size, size, dtype=torch.bool, device=x.device)
    for layer in head.layers:
        chains = BlockAttention(head, layer, context, batch.starts, sees.tril() if head.args.causal else sees)
        x = layer.finish(x, chains.block(layer.attn_norm(x), 1))
    rows = head.norm(head.draft_rows(x))
    return _scored([rows[:, :, i] for i in range(steps)], batch)


def p_eagle_outputs(head: PEagleHead, batch: Batch, features: Tensor, steps: int) -> Tensor:
    """Run P-EAGLE: the sequence, and after each start position a mask token for each further draft step.

    features: the target's [B, T, F].
    """
    text, following = head.fuse(features), head.embed(batch.tokens.roll(-1, 1))
    mask = torch.full_like(batch.starts, head.args.mask_id)
    hidden = head.fuse(head.mask_hidden[None, None]).expand(*batch.starts.shape, -1)
    rows = [hidden[:, :count] for count in batch.chains[1:]]
    layers = [head.layer, *head.more_layers]
    for layer in layers:
        if layer is head.layer:
            read, text = layer.inputs(following, text)
            entering = [layer.inputs(head.embed(mask[:, : row.shape[1]]), row) for row in rows]
        else:
            read, entering = text, [(row, row) for row in rows]
        chains = ChainAttention(head, layer, read, batch.starts)
        if layer is layers[-1]:  # only the start positions
            text = layer.finish(gather_tokens(text, batch.starts), chains.first())
        else:
            text = layer.finish(text, chains.text())
        rows = [layer.finish(row, chains.step(reads, step)) for step, (reads, row) in enumerate(entering, 1)]
    wide = [F.pad(x, (0, 0, 0, batch.starts.shape[1] - x.shape[1])) for x in (text, *rows)]
    return head.norm(_scored(wide, batch))


def _scored(outputs: list[Tensor], batch: Batch) -> Tensor:
    """Select from outputs [B, R, H] of every step the scored predictions [M, H]."""
    return torch.cat([x.flatten(0, 1) for x in outputs])[batch.index]
