"""How one request is sampled."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How one request is decoded. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    top_k is applied first, then top_p on what remains, both on softmax(logits / temperature).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 to 1,000,000, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or more, and below 2^31, got {self.top_k}")

    @property
    def restricts(self) -> bool:
        """Whether top-k or top-p has anything to do."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
