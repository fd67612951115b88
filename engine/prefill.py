"""Reading prompts, one chunk of each in a pass."""
from __future__ import annotations

from torch import Tensor

from drafters.base import Drafter
from engine.state import State
from engine.step import needs_all, noise_ahead, shape_logits
from kernels.tp import logits_of
from model import KVCaches, Transformer
from sampling.options import Modes
from tree import pick


def prefill(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, start: Tensor,
    chunk: Tensor, *modes: bool,
) -> Tensor:
    """Read one chunk of every prompt: positions start [B] + chunk [C].

    A prompt that ends in it gets its first token. modes: those of `sampling.options.Modes`.
    Until then the prompt's last token counts as the root (`length` is the prompt's length - 1). Rows after a
    prompt's end compute nothing anyone sees: their slots are overwritten before they become visible. Returns
    the last states [B, C, H].
    """
    backend, modes, positions = state.backend, Modes(*modes), start[:, None] + chunk
    visible = backend.visible_before(slots, start, chunk.shape[0])
    x, features = target(
        state.tokens.gather(1, positions), positions, positions, visible, caches, drafter.aux_layers
    )
    drafter.read(state, features, positions, visible)

    last = state.length - start
    ends = state.reading & (last < chunk.shape[0])
    row = last.clamp(0, chunk.shape[0] - 1)[:, None]
    noise = noise_ahead(state, 1, target.args.vocab_size) if modes.noisy else None
    raw = logits_of(target, pick(x, row), needs_all(modes))
    chosen = backend.draw(shape_logits(raw, state, modes, state.root()[:, None]), noise)
    state.reading.logical_and_(~ends)
    if modes.scored:
        state.score(raw, chosen)
    count = backend.emit(state, chosen, ends.long())
    if modes.adjusted:
        state.count(chosen, count)
    backend.hand_over(state, features, row, count, where=ends)
    return x
