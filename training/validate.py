"""The acceptance length of a head in training: the real decoder drafts and verifies held-out prompts with it."""
from __future__ import annotations

import copy

import torch

from decoder import Decoder, Sampling
from drafters.eagle import Eagle
from kernels import load as load_kernels
from model import Head, Transformer
from packed import pack
from tree import TreeShape


def decoding_copy(target: Transformer, say) -> Transformer:
    """The same target made for decoding: on a CPU a second copy on our kernels, more than twice as fast. Training needs the
    weights as they are. Elsewhere it is the target itself."""
    if target.embed.weight.device.type != "cpu":
        return target
    load_kernels(say)
    twin = copy.deepcopy(target)
    pack(twin)
    return twin


class Validator:
    """Decodes prompts (lists of ids) greedily with the head of the day. `packed`: `target` is packed, heads are to be too."""

    def __init__(self, target: Transformer, prompts: list[list[int]], stop_ids: list[int], shape: TreeShape, tokens: int, packed: bool):
        self.target, self.prompts, self.stop_ids = target, prompts, stop_ids
        self.shape, self.tokens, self.packed = shape, tokens, packed

    @torch.no_grad()
    def tau(self, head: Head) -> float | None:
        """Mean tokens emitted per step (of steps that were not the prompt's); None if every answer ended with its first token."""
        twin = head.twin(self.target, self.target.embed.weight.dtype)
        if self.packed:
            pack(twin)
        width = min(self.shape.width, head.args.draft_vocab_size)
        nodes = min(self.shape.nodes, width + self.shape.depth * width**2 + 1)
        shape = TreeShape(nodes, self.shape.depth, width)
        batch = min(16, len(self.prompts))
        longest = max(map(len, self.prompts)) + self.tokens
        decoder = Decoder(
            self.target, Eagle(twin, shape), batch=batch, max_seq_len=longest, stop_ids=self.stop_ids, compile=False,
        )
        outputs = decoder.generate(self.prompts, Sampling(self.tokens))
        lengths = [n for o in outputs for n in o.accept_lengths]
        return sum(lengths) / len(lengths) if lengths else None
