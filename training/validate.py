"""The acceptance length of a head in training, from decoding held-out prompts."""
from __future__ import annotations

import time

from drafters.block import block_drafter
from engine.draft import Drafter, HeadDrafter
from engine.engine import Engine
from engine.request import Request
from engine.sampling import Sampling
from head import Head
from model import Transformer
from networks.weights import copy_head
from tree import PAPER_TREE, TreeShape

MAX_ANSWER_TOKENS = 64
MAX_BATCH = 16


def make_drafter(head: Head, shape: TreeShape) -> Drafter:
    """Return a drafter for a head. The tree is `shape`, limited to the head's vocabulary and draft steps."""
    drafter = block_drafter(head) or HeadDrafter
    width, depth = min(shape.width, head.args.draft_vocab_size), shape.depth
    if head.args.drafts:
        depth = min(depth, head.args.drafts - 1)
    return drafter(head, TreeShape(min(shape.nodes, width + depth * width**2 + 1), depth, width))


def acceptance_length(
    target: Transformer, prompts: list[list[int]], stop_ids: list[int], seconds: float, head: Head
) -> float | None:
    """Return the mean tokens per step, without prefill, of greedy answers to prompts (lists of ids).

    target: prepared for a backend. seconds: time limit. Returns None if no step was run.
    """
    copy = copy_head(head, target, target.embed.dtype)
    target.backend.prepare(copy)
    engine = Engine(
        target, make_drafter(copy, PAPER_TREE), batch=min(MAX_BATCH, len(prompts)), stop_ids=stop_ids,
        max_seq_len=max(map(len, prompts)) + MAX_ANSWER_TOKENS, compile=False,
    )
    requests: list[Request] = []
    deadline = time.monotonic() + seconds
    for _ in engine.run(prompts, [Sampling(MAX_ANSWER_TOKENS)] * len(prompts), requests):
        if time.monotonic() > deadline:
            break
    lengths = [n for request in requests for n in request.accept_lengths]
    return sum(lengths) / len(lengths) if lengths else None
