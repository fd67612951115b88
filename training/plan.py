"""How long and how fast a head learns."""
from __future__ import annotations

import math
from dataclasses import dataclass

# Unrolled steps of the short epochs: they teach most of what later steps need, in a quarter of the time.
SHORT = 3


@dataclass(frozen=True)
class Plan:
    """The settings of the training loop. Each of them changes the result."""

    epochs: int = 4
    minutes: float = 0.0  # end after so many of training, with the learning rate's way cut short; 0: never
    short_epochs: int = 0  # how many, the first, unroll at most SHORT steps
    optimizer: str = "adamw"  # of training.choices.OPTIMIZERS
    lr: float = 1e-3
    schedule: str = "cosine"  # cosine | linear | constant, after the warm-up
    warmup: float = 0.03  # share of the steps
    clip: float = 0.5  # norm of the gradient
    weight_decay: float = 0.01
    ema: float = 0.0  # share of the average that stays at every step; 0: no average
    batch_tokens: int = 1024  # padded tokens per optimizer step
    seed: int = 0

    def progress(self, step: int, total: int, seconds: float) -> float:
        """Steps of `total` that count as done after so many steps and seconds, whichever is further.

        It is `total` or more when the steps or the time are over.
        """
        return max(step, total * seconds / (60 * self.minutes)) if self.minutes else step

    def rate(self, step: float, total: int) -> float:
        """Learning rate of a step: linear warm-up, then down to a tenth."""
        warm = max(1, round(total * self.warmup))
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, total - warm)
        shares = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
        return self.lr * (0.1 + 0.9 * shares[self.schedule])

    def unrolled(self, epoch: int, steps: int) -> int:
        """How many of the head's `steps` draft steps an epoch unrolls."""
        return min(SHORT, steps) if epoch < self.short_epochs else steps
