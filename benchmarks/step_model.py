"""What a step takes as a sum of four times, each of which a simple count tells; fitted to measured steps.

    seconds = p · passes + r · rows + k · keys + a · rows × keys

p   reading the weights, once for every pass of the target; h for the head's, which are small
r   the products of a row with all weights; d for the head's
k   reading the keys and values of a token; a the products of a row with them

The model says what a step is made of, and what one that was not measured would take. It knows no caches and
no overlap of memory and arithmetic, so single steps are off by what `errors` says.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree import TreeShape

TERMS = ("weights", "rows", "keys", "attention", "head's weights", "head's rows")


def counts(shape: TreeShape, batch: int, context: int, layers: int) -> list[float]:
    """How much of each of `TERMS` a step has. shape: of one node, plain decoding. layers: of the target, of
    which the head has one.
    """
    passes, head_rows = 0, 0
    if shape.nodes > 1:
        passes, head_rows = shape.depth + 1, shape.window + shape.depth * shape.width
    keys, rows = 1 + passes / layers, shape.nodes + head_rows / layers
    return [1, batch * shape.nodes, batch * context * keys, batch * context * rows, passes, batch * head_rows]


@dataclass(frozen=True)
class StepModel:
    """Milliseconds of one of each of `TERMS`."""

    milliseconds: tuple[float, ...]
    layers: int

    @classmethod
    def fitted(cls, measured: list[tuple[TreeShape, int, int, float]], layers: int) -> StepModel:
        """The model with the least squares of relative errors, none of its times below zero.

        measured: tree, batch, context and milliseconds of steps. Raises ValueError if there are fewer steps
        than terms.
        """
        if len(measured) < len(TERMS):
            raise ValueError(f"{len(measured)} steps do not tell {len(TERMS)} times")
        parts = np.array([counts(*step, layers) for *step, _ in measured], dtype=float)
        parts /= np.array([ms for *_, ms in measured])[:, None]
        used = list(range(len(TERMS)))
        while True:  # a term whose time would be below zero is left out
            best = np.linalg.lstsq(parts[:, used], np.ones(len(parts)), rcond=None)[0]
            if (best >= 0).all():
                break
            used.pop(int(best.argmin()))
        times = np.zeros(len(TERMS))
        times[used] = best
        return cls(tuple(times.tolist()), layers)

    def __call__(self, shape: TreeShape, batch: int, context: int) -> float:
        """Milliseconds of a step."""
        return sum(n * t for n, t in zip(counts(shape, batch, context, self.layers), self.milliseconds))

    def errors(self, measured: list[tuple[TreeShape, int, int, float]]) -> list[float]:
        """By how much of each measured step the model is off, sorted."""
        return sorted(abs(self(*step) / ms - 1) for *step, ms in measured)
