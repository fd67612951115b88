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
    after = request.prompt[request.prefilled + 1 : request.prefilled + 1 + x.shape[1]]
    if not after:
        return
    logits = chunk_logits(runner, x)[:, : len(after)]
    own, top, ids = log_probabilities(logits, torch.tensor([after], device=x.device), MAX_LOGPROBS)
    found = zip(own[0].tolist(), top[0].tolist(), ids[0].tolist())
    wanted = request.sampling.logprobs or 0
    request.prompt_scores += [Score(o, list(zip(i, t))[:wanted]) for o, t, i in found]
