"""The step of decoding compared with itself: by definitions, compiled on our kernels, and captured.

`checked` is called for each target on a GPU. It adds two parts to those of `kernels.gpu.cases`.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn as nn

from drafters.eagle import Eagle
from engine.engine import Engine
from engine.passes import Passes
from kernels.backend import TORCH, TorchBackend
from kernels.gpu.cases import PARTS, Case, Sizes
from kernels.gpu.check import failures, main
from kernels.quantized import Scheme, quantize_linears
from model import ModelArgs, Transformer
from networks.eagle import Eagle3Head
from networks.head import HeadArgs
from sampling.options import Modes
from tree import TreeShape

VOCABULARY, WIDTH, TOKENS, REPLAYS = 1000, 256, 70, 3
TREE = TreeShape(8, 2, 4)  # small: its step is soon compiled
MODES = Modes(noisy=True)


def checked(
    backend: TorchBackend, model: Transformer, float8: bool, say: Callable[[str], None]
) -> TorchBackend:
    """Return a backend without the parts that fail on this GPU at a target's sizes.

    float8: of its caches. say: gets a line about each part. Ranks leave out the same parts, those that fail
    on any of them: all capture a step, or none.
    """
    command, slow = (sys.executable, "-m", "engine.check"), ("attend", "linear")  # to compile
    others = [part for part in PARTS if part not in slow]
    groups = [*([part] for part in PARTS if part in slow), others, [*STEPS]]
    found = failures(Sizes.of(model, float8), say, groups, command)
    if model.ranks is not None:
        parts = [*PARTS, *STEPS]
        failed = torch.tensor([part in found for part in parts], device=model.embed.weight.device)
        everywhere = zip(parts, model.ranks.every(failed).any(0).tolist())
        found = {part: found.get(part, f"{part!r} fails on another rank") for part, no in everywhere if no}
    return backend.without(found)


def _prepared(s: Sizes, backend: TorchBackend, dtype: torch.dtype) -> Passes:
    """Return passes of a small target with these heads and an EAGLE-3 head, both random, amid two texts."""
    nh, nkv, hd = s.heads
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": nh,
        "num_kv_heads": nkv, "head_dim": hd,
    }
    target = Transformer(ModelArgs(num_layers=2, qk_norm=s.norm, **shape))
    head = Eagle3Head(HeadArgs(
        num_layers=1, draft_vocab_size=VOCABULARY, target_hidden_size=WIDTH, aux_layers=(0, 1, 2), **shape
    ))
    draw = torch.Generator().manual_seed(1)

    def fill(module: nn.Module) -> None:
        for x in module.parameters():
            x.copy_(torch.randn(x.shape, generator=draw) * (x.shape[-1] ** -0.5 if x.ndim > 1 else 1))

    fill(target), fill(head)
    target.requires_grad_(False).to(s.device, dtype), head.requires_grad_(False).to(s.device, dtype)
    head.use_target(target)
    quantize_linears(head, Scheme("int8", 0, None))  # heads in 16 bits are when they are loaded
    backend.prepare(target, head)
    drafter = Eagle(head, TREE)
    passes = Engine(target, drafter, batch=2, max_seq_len=4 * TOKENS, compile=backend.name != "torch").passes
    state = passes.state
    for x in (*passes.caches, *drafter.caches):
        for held in (x.k[:, : passes.slots], x.v[:, : passes.slots]):
            held.copy_(torch.randn(held.shape, generator=draw))
    state.features.copy_(torch.randn(state.features.shape, generator=draw))
    state.tokens.copy_(torch.randint(VOCABULARY, state.tokens.shape, generator=draw))
    state.root.copy_(state.tokens[:, TOKENS : TOKENS + 1])
    state.key.copy_(torch.tensor([[1, 2], [3, 4]]))
    values = {"length": TOKENS, "limit": 3 * TOKENS, "n_new": 1, "done": 0, "temperature": 1}
    for name, value in values.items():
        state.get_buffer(name).fill_(value)
    return passes


def scribble(device: torch.device) -> None:
    """Fill memory that has been given back with bytes that are no number."""
    for size in range(9, 21):
        _ = [torch.full((1 << size,), 0xFF, dtype=torch.uint8, device=device) for _ in range(8)]


def _steps(s: Sizes, captured: bool) -> Iterator[Case]:
    """A compiled step in float32 is compared with its definition. A captured one, in the target's dtype, is
    compared with the compiled one, bit for bit.
    """
    used: list[TorchBackend] = []

    def run(backend: TorchBackend) -> list:
        """Steps from one state; between them another graph writes into their pool, and all that is free is
        written.
        """
        if backend is not TORCH:
            used.append(backend)
        passes = _prepared(s, *((used[-1], s.torch_dtype) if captured else (backend, torch.float32)))
        found = []
        if backend is TORCH or not captured:
            passes.captured = None
        rows, span, state = passes.rows(0, 2), passes.span(2 * TOKENS), passes.state
        buffers = [*state.buffers(), *passes.caches.buffers(), *passes.drafter.caches.buffers()]
        first = [x.clone() for x in buffers]
        for _ in range(REPLAYS):
            for x, kept in zip(buffers, first):
                x.copy_(kept)
            tree, path = passes.step(rows, span, passes.drafter, MODES)
            found += [x.clone() for x in (*tree, path, state.tokens, state.length, state.out, state.n_new)]
            passes.run(rows, ("scribble",), partial(scribble, passes.device))
            if passes.on_cuda:
                torch.cuda.empty_cache()
            scribble(passes.device)
        if passes.fallbacks[len(passes.backend.failures) :]:
            raise AssertionError(passes.fallbacks[-1])
        return found

    yield Case(f"2 sequences, a tree of {TREE.nodes}", run, 0.0 if captured else 1e-3, 0, False)


STEPS = {"compiled step": lambda s: _steps(s, False), "captured step": lambda s: _steps(s, True)}

if __name__ == "__main__":
    main(PARTS | STEPS)
