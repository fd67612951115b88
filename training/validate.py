"""The acceptance length of a head in training: the real decoder decodes held-out prompts with it.

All use of the engine by validation is in `acceptance` and `Validator.calibration`.
"""
from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from drafters.base import Drafter
from drafters.dflash import DFlash
from drafters.eagle import Eagle
from drafters.p_eagle import PEagle
from engine.autotune import Calibration
from engine.calibrate import calibrate
from engine.engine import Engine
from kernels.choose import choose_backend
from model import Transformer
from networks.block import BlockHead
from networks.eagle import PEagleHead
from networks.head import Head
from sampling.options import Sampling
from tree import TreeShape

SHAPE = TreeShape(60, 7, 10)  # of the trees that are drafted, as in the papers
TOKENS = 64  # of an answer


def decoding_copy(target: Transformer, kernels: bool) -> Transformer:
    """Return the target for decoding: on a CPU with `kernels` a packed copy, elsewhere the target itself.

    Training needs unpacked weights.
    """
    if not kernels or target.embed.weight.device.type != "cpu":
        return target
    twin = copy.deepcopy(target)
    choose_backend("cpu").prepare(twin)
    return twin


def drafter_of(head: Head, shape: TreeShape) -> Drafter:
    """Return a drafter for a head, on a tree of this size as far as its vocabulary and its depth allow."""
    drafter = DFlash if isinstance(head, BlockHead) else PEagle if isinstance(head, PEagleHead) else Eagle
    width, depth = min(shape.width, head.args.draft_vocab_size), shape.depth
    if drafts := getattr(head.args, "drafts", None):
        depth = min(depth, drafts - 1)
    return drafter(head, TreeShape(min(shape.nodes, width + depth * width**2 + 1), depth, width))


@torch.no_grad()
def acceptance(
    target: Transformer, head: Head, prompts: list[list[int]], stop_ids: list[int], shape: TreeShape,
    tokens: int, temperature: float = 0.0,
) -> float | None:
    """Return the acceptance length tau: mean tokens emitted per step, over `tokens` tokens after each prompt.

    prompts: lists of ids; each answer has a seed of its own. The pass over the prompt does not count. None if
    every answer ended with its first token.
    """
    batch, longest = min(16, len(prompts)), max(map(len, prompts)) + tokens
    engine = Engine(
        target, drafter_of(head, shape), batch=batch, max_seq_len=longest, stop_ids=stop_ids, compile=False
    )
    sampling = [Sampling(tokens, temperature, seed=i) for i in range(len(prompts))]
    lengths = [n for output in engine.generate(prompts, sampling) for n in output.accept_lengths]
    return sum(lengths) / len(lengths) if lengths else None


class Validator:
    """Decodes prompts (lists of ids) greedily with the current head. target: that of `decoding_copy`."""

    def __init__(self, target: Transformer, prompts: list[list[int]], stop_ids: list[int]):
        self.target, self.prompts, self.stop_ids = target, prompts, stop_ids

    def tau(self, head: Head) -> float | None:
        """Return the `acceptance` of a copy of the head."""
        return acceptance(self.target, self._twin(head), self.prompts, self.stop_ids, SHAPE, TOKENS)

    def calibration(self, head: Head, say: Callable[[str], None]) -> Calibration:
        """Measure how many tokens every tree of the head gets accepted. Raises InputError as `calibrate`."""
        drafter = drafter_of(self._twin(head), SHAPE)
        return calibrate(self.target, drafter, self.prompts, self.stop_ids, TOKENS, say)

    def _twin(self, head: Head) -> Head:
        twin = head.twin(self.target, self.target.embed.weight.dtype)
        if self.target.backend:
            self.target.backend.prepare(twin)
        return twin
