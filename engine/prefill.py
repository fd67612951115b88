"""Reading prompts, one chunk of each in a pass."""
from __future__ import annotations

import torch.nn as nn
from torch import Tensor

from drafters.base import Drafter
from engine.state import State
from engine.step import noise_ahead, restrict_logits
from kernels.parts import draw, visible_before
from model import Transformer
from tree import pick


def prefill(
    target: Transformer, caches: nn.ModuleList, drafter: Drafter, state: State, slots: Tensor, start: Tensor,
    chunk: Tensor,
    noisy: bool, restricted: bool,
) -> None:
    """Read one chunk of every prompt: positions start [B] + chunk [C].

    A prompt that ends in it gets its first token.
    Until then the prompt's last token counts as the root (`length` is the prompt's length - 1). Rows after a
    prompt's end compute nothing anyone sees: their slots are overwritten before they become visible.
    """
    positions = start[:, None] + chunk
    visible = visible_before(slots, start, chunk.shape[0])
    x, features = target(
        state.tokens.gather(1, positions), positions, positions, visible, caches, drafter.aux_layers
    )
    drafter.read(state, features, positions, visible)

    last = state.length - start
    ends = state.reading & (last < chunk.shape[0])
    row = last.clamp(0, chunk.shape[0] - 1)[:, None]
    noise = noise_ahead(state, 1, target.args.vocab_size) if noisy else None
    logits = restrict_logits(target.logits(pick(x, row)), state, restricted)
    chosen = draw(logits, noise)
    state.reading.logical_and_(~ends)
    count = state.emit(chosen, ends.long())
    state.hand_over(features, row, count, ends)
