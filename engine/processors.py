"""Logits processors other than top-k, top-p and min-p: grammars, biases, penalties; and log-probabilities.

At every node of a tree logits are processed as if the output ended there. `engine.state.State.processors`
creates them for the first request that needs one.
"""
from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from engine.request import Guide, Score
from engine.sampling import MAX_LOGPROBS, Modes, Sampling
from engine.state import State, batch_buffer


class Processors(nn.Module):
    """Buffers of the logits processors, by batch slot.

    counts [B, V]: occurrences of each token in the output, root included. prompted [B, V] bool: tokens of the
    prompt. bias [B, V]; presence, frequency, repetition [B]: see `Sampling`.
    allowed [B, T, V/32]: int32, a bit for each token that a grammar allows after each node.
    logprob [B, W], top_logprobs, top_ids [B, W, 20]: of what the last step emitted.
    """

    def __init__(self, state: State):
        """state: gives sizes and device."""
        super().__init__()
        V, W, top = state.vocabulary, state.max_commit, min(MAX_LOGPROBS, state.vocabulary)
        buffer = partial(batch_buffer, self, len(state.length), state.aligned, state.length.device)
        for name in ("presence", "frequency"):
            buffer(name, dtype=torch.float32)
        buffer("repetition", dtype=torch.float32, fill=1)
        buffer("counts", V, dtype=torch.int32)
        buffer("prompted", V, dtype=torch.bool)
        buffer("bias", V, dtype=torch.float32)
        buffer("allowed", state.nodes, -(-V // 32), dtype=torch.int32, fill=-1)
        buffer("logprob", W, dtype=torch.float32)
        buffer("top_logprobs", W, top, dtype=torch.float32)
        buffer("top_ids", W, top)

    def start_request(self, slot: int, prompt: Tensor, sampling: Sampling) -> None:
        """Start a request in a slot. prompt [P]: its token ids."""
        self.presence[slot], self.frequency[slot] = sampling.presence_penalty, sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.allowed[slot], self.bias[slot], self.counts[slot] = -1, 0, 0
        self.prompted[slot] = False
        self.prompted[slot, prompt] = True
        for token, bias in sampling.logit_bias:
            self.bias[slot, token] = bias

    def apply(self, logits: Tensor, modes: Modes, tokens: Tensor, ancestors: Tensor | None) -> Tensor:
        """Return the logits [B, T, V] after grammar, biases and penalties.

        tokens [B, T], ancestors [B, T, T]: of the tree; without ancestors, of its root alone.
        """
        if modes.guided:
            logits = allow(logits, self.allowed[:, : tokens.shape[1]])
        if not modes.adjusted:
            return logits
        if ancestors is None:
            ancestors = torch.ones_like(tokens[..., None], dtype=torch.bool)
        return apply_penalties(logits, self, tokens, ancestors)

    def count(self, tokens: Tensor, appended: Tensor) -> None:
        """Count the first `appended` [B] of tokens [B, W] as part of the output."""
        new = torch.arange(tokens.shape[1], device=tokens.device) < appended[:, None]
        self.counts.scatter_add_(1, tokens.clamp(min=0), new.to(self.counts.dtype))

    def score(self, logits: Tensor, tokens: Tensor) -> None:
        """Store the log-probabilities of tokens [B, W'] under logits [B, W', V], and of the most probable."""
        scores = log_probabilities(logits, tokens.clamp(min=0), self.top_ids.shape[-1])
        for buffer, values in zip(self.scores, scores):
            buffer[:, : tokens.shape[1]] = values

    @property
    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """The buffers that `score` fills: logprob, top_logprobs, top_ids."""
        return self.logprob, self.top_logprobs, self.top_ids

    def mask(self, slot: int, guide: Guide, tokens: list[int], parent: list[int]) -> None:
        """Store which tokens a guide allows after each node of a tree."""
        rows = torch.full((len(tokens), self.allowed.shape[2]), -1, dtype=torch.int32)
        guide.mask(tokens, parent, rows.numpy())
        self.allowed[slot, : len(tokens)] = rows.to(self.allowed.device)


def scores_of(scores: list[list], slot: int, count: int, num_logprobs: int | None) -> list[Score]:
    """Return the scores of the first `count` tokens of a slot of `Processors.scores`.

    num_logprobs: number of top tokens with each; None: return [].
    """
    if num_logprobs is None:
        return []
    tokens = zip(*(x[slot][:count] for x in scores))
    return [Score(logprob, list(zip(ids, top))[:num_logprobs]) for logprob, top, ids in tokens]


def apply_penalties(logits: Tensor, processors: Processors, tokens: Tensor, ancestors: Tensor) -> Tensor:
    """Return the logits [B, T, V] at the nodes of a tree after biases and penalties.

    tokens [B, T]: of the tree, root first. ancestors [B, T, T]: row i marks node i and its ancestors. At a
    node, the tokens on its path count as output.
    """
    penalties = processors.presence, processors.frequency, processors.repetition
    presence, frequency, repetition = (x[:, None, None] for x in penalties)

    def penalize(logits: Tensor, times: Tensor, prompted: Tensor, bias: Tensor) -> Tensor:
        """Apply bias and penalties to logits [B, T, N] of tokens that occur `times` times in the output."""
        x, in_output = logits + bias, times > 0
        x = torch.where(in_output | prompted, torch.where(x > 0, x / repetition, x * repetition), x)
        return x - frequency * times - presence * in_output

    by_token = processors.counts, processors.prompted, processors.bias
    penalized, T = penalize(logits, *(x[:, None] for x in by_token)), tokens.shape[1]
    if T == 1:
        return penalized
    # Count every token of the tree on the path to each node; the root is counted already.
    same_token = (tokens[:, :, None] == tokens[:, None]).float()
    path = torch.cat((torch.zeros_like(ancestors[..., :1]), ancestors[..., 1:]), -1).float()
    on_path = (path @ same_token).to(processors.counts.dtype)  # [B, node, token of the tree]
    ids = tokens[:, None].expand(-1, T, -1)
    counts, prompted, bias = (x.gather(1, tokens)[:, None] for x in by_token)
    # Nodes with the same token scatter the same value.
    return penalized.scatter(-1, ids, penalize(logits.gather(-1, ids), counts + on_path, prompted, bias))


def allow(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits [B, T, V], -inf where the bit of a token in allowed [B, T, V/32] int32 is not set."""
    bits = allowed[..., None] >> torch.arange(32, dtype=torch.int32, device=allowed.device) & 1
    return torch.where(bits.flatten(2)[..., : logits.shape[-1]] != 0, logits, float("-inf"))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens [B, W], and of the top `count` tokens, under logits [B, W, V].

    Returns: log-probabilities [B, W]; top log-probabilities and their ids, both [B, W, count].
    """
    log_sum = logits.logsumexp(-1, keepdim=True)
    top, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return logits.gather(-1, tokens[..., None])[..., 0] - log_sum[..., 0], top - log_sum, ids
