"""Log-probabilities of prompt tokens, for completions that echo their prompt."""
from __future__ import annotations

import torch

from engine.processors import log_probabilities
from engine.request import Request, Score
from engine.sampling import MAX_LOGPROBS


def score_prompt(runner, request: Request, x: torch.Tensor) -> None:
    """Score the prompt tokens after those of a chunk, whose last states are x [1, C, H].

    runner: the `engine.runner.ModelRunner` that computed them.
    """
    after = request.prompt[request.read + 1 : request.read + 1 + x.shape[1]]
    if not after:
        return
    logits = runner.logits(x)[:, : len(after)]
    own, top, ids = log_probabilities(logits, torch.tensor([after], device=x.device), MAX_LOGPROBS)
    found = zip(own[0].tolist(), top[0].tolist(), ids[0].tolist())
    wanted = request.sampling.logprobs or 0
    request.prompt_scores += [Score(o, list(zip(i, t))[:wanted]) for o, t, i in found]
