"""The acceptance length of a head in training: the real decoder decodes held-out prompts with it."""
from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from drafters.base import Drafter
from drafters.dflash import DFlash
from drafters.eagle import Eagle
from drafters.hydra import Hydra
from drafters.medusa import Medusa
from drafters.p_eagle import PEagle
from engine.calibrating import calibrate
from engine.calibration import Calibration
from engine.decoder import Decoder
from kernels.choose import choose_backend
from model import Transformer
from networks.block import BlockHead
from networks.eagle import PEagleHead
from networks.head import Head
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads
from sampling.options import Sampling
from tree import TreeShape, likely_tree


def decoding_copy(target: Transformer) -> Transformer:
    """The target for decoding: on a CPU a second copy on our kernels, more than twice as fast; elsewhere the
    target itself.

    Training needs the weights as they are, and a packed model has none.
    """
    if target.embed.weight.device.type != "cpu":
        return target
    twin = copy.deepcopy(target)
    choose_backend("cpu").prepare(twin)
    return twin


def drafter_of(head: Head, shape: TreeShape) -> Drafter:
    """A drafter for any head, on a tree of this size as far as its vocabulary and its depth allow."""
    if isinstance(head, (MedusaHeads, HydraHeads)):
        tree = likely_tree(shape.nodes, head.args.guesses)
        return (Medusa if isinstance(head, MedusaHeads) else Hydra)(head, tree)
    width = min(shape.width, head.args.draft_vocab_size)
    kind, depth = Eagle, shape.depth
    if isinstance(head, (BlockHead, PEagleHead)):
        kind, depth = PEagle if isinstance(head, PEagleHead) else DFlash, min(depth, head.args.drafts - 1)
    nodes = min(shape.nodes, width + depth * width**2 + 1)
    return kind(head, TreeShape(nodes, depth, width))


@torch.no_grad()
def acceptance(
    target: Transformer, head: Head, prompts: list[list[int]], stop_ids: list[int], shape: TreeShape,
    tokens: int, temperature: float = 0.0,
) -> float | None:
    """Acceptance length tau: mean tokens emitted per step, decoding `tokens` tokens after each prompt (lists
    of ids), each with a seed of its own.

    The pass over the prompt does not count. None if every answer ended with its first token.
    """
    drafter = drafter_of(head, shape)
    batch, longest = min(16, len(prompts)), max(map(len, prompts)) + tokens
    decoder = Decoder(target, drafter, batch=batch, max_seq_len=longest, stop_ids=stop_ids, compile=False)
    sampling = [Sampling(tokens, temperature, seed=i) for i in range(len(prompts))]
    lengths = [n for o in decoder.generate(prompts, sampling) for n in o.accept_lengths]
    return sum(lengths) / len(lengths) if lengths else None


class Validator:
    """Decodes prompts (lists of ids) greedily with the current head. packed: heads run on our kernels, as
    `target` does.
    """

    def __init__(
        self, target: Transformer, prompts: list[list[int]], stop_ids: list[int], shape: TreeShape,
        tokens: int, packed: bool,
    ):
        self.target, self.prompts, self.stop_ids = target, prompts, stop_ids
        self.shape, self.tokens, self.packed = shape, tokens, packed
        self.tree_name = f"{shape.nodes},{shape.depth},{shape.width}"

    def tau(self, head: Head) -> float | None:
        """The `acceptance` of a copy of the head."""
        twin = self._twin(head)
        return acceptance(self.target, twin, self.prompts, self.stop_ids, self.shape, self.tokens)

    def calibration(self, head: Head, say: Callable[[str], None]) -> Calibration:
        """What the trees of a copy of a head are accepted for. Raises InputError as `calibrate`."""
        tokens = max(self.tokens, 64)
        drafter = drafter_of(self._twin(head), self.shape)
        return calibrate(self.target, drafter, self.prompts, self.stop_ids, tokens, say)

    def _twin(self, head: Head) -> Head:
        twin = head.twin(self.target, self.target.embed.weight.dtype)
        if self.packed:
            choose_backend("cpu").prepare(twin)
        return twin
