"""Our model without our decoder, through torch.compile's own CUDA graphs: what gpt-fast does."""
from __future__ import annotations

import time

import torch
from bench import Decoded, settle  # first: it makes the modules below importable
from torch import Tensor

from engine.compiling import compile_graph
from model import Transformer


class CompiledLoop:
    """Greedy decoding, one row a pass, over a static cache of `slots` slots, all of which are attended to.

    No token comes to the host before the end. So the loop goes on after a stop id: the text is cut there, and
    the speed is that of all passes.
    """

    def __init__(self, target: Transformer, stop_ids: list[int], slots: int):
        self.target, self.stop_ids = target, set(stop_ids)
        device = target.embed.weight.device
        self.caches, self.slots = target.caches(1, slots), torch.arange(slots, device=device)
        self.token, self.position = (torch.zeros(1, 1, dtype=torch.int64, device=device) for _ in range(2))
        self.step = compile_graph(self._next, mode="reduce-overhead")

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The token [1, 1] after a pass over tokens [1, T]."""
        visible = self.slots <= positions[..., None]
        x, _ = self.target(tokens, positions, positions, visible, self.caches)
        return self.target.logits(x[:, -1:]).argmax(-1)

    @torch.no_grad()
    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt. Its pass is not compiled; the clock starts after it."""
        prompt = torch.tensor([ids], device=self.slots.device)
        self.token.copy_(self._next(prompt, self.slots[None, : len(ids)]))
        self.position.fill_(len(ids))
        texts = [self.token.clone()]
        settle(prompt.device)
        began = time.perf_counter()
        for _ in range(tokens - 1):
            self.token.copy_(self.step(self.token, self.position))
            self.position.add_(1)
            texts.append(self.token.clone())
        settle(prompt.device)
        seconds = time.perf_counter() - began
        text = torch.cat(texts, 1)[0].tolist()
        end = next((i + 1 for i, token in enumerate(text) if token in self.stop_ids), tokens)
        return Decoded(text[:end], (tokens - 1) / seconds if tokens > 1 else 0.0, [])
