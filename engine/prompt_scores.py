"""Log-probabilities of prompt tokens, for completions that echo their prompt."""
from __future__ import annotations

import torch

from engine.processors import log_probabilities
from engine.request import Request, Score
from engine.sampling import MAX_LOGPROBS


def chunk_logits(runner, x: torch.Tensor) -> torch.Tensor:
    """Return the target's logits of a chunk, padding included: compiled kernels need full chunks."""
    with runner.device_context():
        return runner.target.logits(x)


def score_prompt(runner, request: Request, x: torch.Tensor) -> None:
    """Append log-probabilities of the prompt tokens that follow those of a chunk.

    x [1, C, H]: its residual stream. runner: the `engine.runner.ModelRunner` that computed them.
    """
    next_tokens = request.prompt[request.prefilled + 1 : request.prefilled + 1 + x.shape[1]]
    if not next_tokens:
        return
    logits = chunk_logits(runner, x)[:, : len(next_tokens)]
    scores = log_probabilities(logits, torch.tensor([next_tokens], device=x.device), MAX_LOGPROBS)
    num_logprobs = request.sampling.logprobs or 0
    request.prompt_scores += [Score(logprob, list(zip(ids, top))[:num_logprobs])
                              for logprob, top, ids in zip(*(values[0].tolist() for values in scores))]
