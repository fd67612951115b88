"""Text that a target writes itself, to calibrate its quantisation on."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.loading import load_model
from common.errors import InputError
from engine.calibrate import PROMPTS
from engine.engine import Engine
from engine.prompt import encode
from kernels.choose import choose_backend
from sampling.options import Sampling
from tokens.tokenizer import Tokenizer


def own_text(checkpoint: Path, say: Callable[[str], None], rows: int = 32, most: int = 224) -> Tensor:
    """Return texts [rows, T] of token ids, the last `most` or more sampled at temperature 1 after `PROMPTS`.

    After the end of an answer the target goes on with turns of its own. `say` is called if our
    kernels cannot be used. Raises InputError without a tokenizer of this model, or if the caches do not fit.
    """
    tokenizer = Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: writing a text to calibrate on needs a tokenizer")
    prompts = [encode(tokenizer, PROMPTS[i % len(PROMPTS)]) for i in range(rows)]
    length = max(map(len, prompts)) + most
    model, _ = load_model(checkpoint)
    largest, vocab_size = max(map(max, prompts)), model.args.vocab_size
    if largest >= vocab_size:
        raise InputError(
            f"{checkpoint}: the tokenizer gives token id {largest}, the model's vocabulary is 0 to"
            f" {vocab_size - 1}; the tokenizer is another model's"
        )
    choose_backend("cpu", say=say).prepare(model)
    try:
        engine = Engine(model, batch=rows, max_seq_len=length, compile=False)
    except ValueError as e:  # the caches do not fit
        raise InputError(f"{checkpoint}: {e}") from None
    samplings = [Sampling(length, temperature=1.0, seed=i) for i in range(rows)]
    return torch.tensor([request.tokens[:length] for request in engine.generate(prompts, samplings)])
