"""Decoder states made by hand."""
import torch

from engine.state import State


def state_of(texts: list[list[int]], slots: int = 64) -> State:
    """Sequences whose last token is the root."""
    state = State(len(texts), slots, 8, 0, [], torch.float32, "cpu")
    # Stale tokens behind the text must not matter.
    state.tokens.random_(0, 4, generator=torch.Generator().manual_seed(0))
    for i, text in enumerate(texts):
        state.tokens[i, : len(text)] = torch.tensor(text)
        state.length[i] = len(text) - 1
    state.done.fill_(False)
    return state
