"""The acceptance length of a head in training: the real decoder decodes held-out prompts with it."""
from __future__ import annotations

from drafters.block import block_drafter
from engine.draft import Drafter, HeadDrafter
from engine.engine import Engine
from head import Head
from model import Transformer
from networks.weights import twin
from sampling.options import Sampling
from tree import PAPER_TREE, TreeShape

ANSWER_TOKENS = 64
MAX_BATCH = 16


def make_drafter(head: Head, shape: TreeShape) -> Drafter:
    """Return a drafter for a head. The tree is `shape`, cut to the head's vocabulary and draft steps."""
    drafter = block_drafter(head) or HeadDrafter
    width, depth = min(shape.width, head.args.draft_vocab_size), shape.depth
    if head.args.drafts:
        depth = min(depth, head.args.drafts - 1)
    return drafter(head, TreeShape(min(shape.nodes, width + depth * width**2 + 1), depth, width))


class Validator:
    """Decodes prompts (lists of ids) greedily with the current head. target: prepared for a backend."""

    def __init__(self, target: Transformer, prompts: list[list[int]], stop_ids: list[int]):
        self.target, self.prompts, self.stop_ids = target, prompts, stop_ids

    def tau(self, head: Head) -> float | None:
        """Return the acceptance length: mean tokens emitted per step, without prefill.

        None if every answer ended with its first token.
        """
        copy = twin(head, self.target, self.target.embed.weight.dtype)
        self.target.backend.prepare(copy)
        engine = Engine(
            self.target, make_drafter(copy, PAPER_TREE), batch=min(MAX_BATCH, len(self.prompts)),
            max_seq_len=max(map(len, self.prompts)) + ANSWER_TOKENS, stop_ids=self.stop_ids, compile=False,
        )
        requests = engine.generate(self.prompts, Sampling(ANSWER_TOKENS))
        lengths = [n for request in requests for n in request.accept_lengths]
        return sum(lengths) / len(lengths) if lengths else None
