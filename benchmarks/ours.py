"""This project's engine for benchmarks. Only this file builds engines and drafters."""
from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import Decoded, synchronize
from shapes import random_models

from common.cli import log_stderr
from engine.draft import Drafter, HeadDrafter
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.graphs import CapturedCalls
from engine.request import encode
from engine.sampling import Sampling
from engine.target import Runtime, Target, load_target
from head import Head
from kernels.choose import on_backend
from model import Transformer
from tokens.tokenizer import Tokenizer
from tree import TreeShape

# New ids of each prompt in a pass; empty during prefill.
Passes = Generator[list[list[int]], None, None]

EXPERT_WEIGHTS = re.compile(r"\.mlp\.(routed\.)?w_")  # parameter names of experts


def bytes_per_step(target: Transformer, drafter: Drafter) -> int:
    """Return the weight bytes that a step reads: the target's once, the drafter's once per tree level.

    Embedding tables are excluded. The number of experts is the expected one with uniform routing.
    """
    def size(module, tokens: int = 1) -> int:
        a, skip = module.args, () if module.lm_head is None else ("embed.",)  # a tied table is the lm_head
        experts = getattr(a, "num_experts", 0)
        chosen = 1 - (1 - a.experts_per_token / experts) ** tokens if experts else 1
        read = ((n, p.numel() * p.element_size()) for n, p in module.named_parameters())
        return int(sum(
            size * (chosen if EXPERT_WEIGHTS.search(n) else 1) for n, size in read if not n.startswith(skip)
        ))

    drafters = getattr(drafter, "parts", (drafter,))
    networks = sum((part.shape.max_commit - 1) * size(part.network) for part in drafters if part.network)
    return size(target, drafter.shape.nodes) + networks


class Model:
    """A loaded target: a checkpoint, or a shape with random weights and an EAGLE-3 head."""

    def __init__(self, target: Target, head: Head | None = None):
        self.target, self.head, self.weights = target, head, target.model
        self.device = self.weights.embed.device
        self.longest, self.stop_ids = self.weights.args.max_seq_len, target.config["stop_ids"]

    def encode(self, text: str) -> list[int]:
        """Encode a user message."""
        return encode(self.target.tokenizer, text)

    def runner(
        self, method: str = "none", tree: TreeShape | None = None, *, batch: int = 1, stops: bool = True,
        max_seq_len: int | None = None, draft: str | None = None, window: int | None = None,
    ) -> Runner:
        """Return a runner for batches of up to `batch` prompts.

        tree: None: sized by the cost model. draft, window: see --draft and --draft-window. stops: whether
        stop ids end a sequence.
        """
        target = self.target if stops else replace(self.target, config=self.target.config | {"stop_ids": []})
        if self.head is None:
            drafting = DraftOptions(method, draft=draft, tree=tree, window=window)
            engine = target.engine(drafting, batch=batch, max_seq_len=max_seq_len)
        else:
            drafter = None if method == "none" else HeadDrafter(self.head, tree)
            engine = Engine(
                self.weights, drafter, batch=batch, max_seq_len=max_seq_len or 2048, log=log_stderr,
                compile=target.runtime.compile, batch_sizes=(batch,),
            )
        return Runner(engine)

    def slot_batch(self, method: str, tree: TreeShape | None, slots: int, max_seq_len: int) -> SlotBatch:
        """Return an engine with continuous batching."""
        engine = self.target.engine(
            DraftOptions(method, tree=tree), batch=slots, max_seq_len=max_seq_len, serves=True
        )
        return SlotBatch(engine)


class Runner:
    """An engine that decodes one batch of prompts at a time."""

    def __init__(self, engine: Engine):
        self.engine, self.requests = engine, []

    def passes(self, prompts: list[list[int]], sampling: list[Sampling]) -> Passes:
        """Decode up to `batch` prompts, pass by pass. Remove unfinished requests of the previous call."""
        for request in self.requests:
            self.engine.remove(request)
        self.requests = [self.engine.admit(*pair) for pair in zip(prompts, sampling)]
        while any(request.active for request in self.requests):
            new: list[list[int]] = [[] for _ in prompts]
            for event in self.engine.step():
                new[self.requests.index(event.request)] += event.ids
            yield new

    def since_first(self) -> float:
        """Return the seconds since all requests of the last batch had their first token."""
        return time.perf_counter() - max(request.first for request in self.requests)

    def decode(self, ids: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Decoded:
        """Decode one prompt. Timing starts at the first token."""
        (request,) = self.requests = self.engine.generate([ids], Sampling(tokens, temperature, seed=seed))
        return Decoded(request.ids, request.tokens_per_second, request.accept_lengths)

    def trees(self) -> Counter:
        """Return the number of steps of the last batch by tree size, or "plain"."""
        return sum((request.trees for request in self.requests), Counter())

    def warm_up(self, temperature: float = 0.0, exhaustive: bool = True) -> Runner:
        """Compile and capture passes. exhaustive: for all lengths and options. Return self."""
        self.engine.warm_up(Sampling(8, temperature), exhaustive=exhaustive)
        return self

    def bytes_read(self, context: int) -> int:
        """Return the bytes that a step reads: weights, and the KV cache of `context` tokens."""
        engine = self.engine
        weights = bytes_per_step(engine.target, engine.drafter)
        return weights + engine.target.cache_bytes(engine.batch, context)

    @torch.no_grad()
    def verify_seconds(self, context: int, repeat: int) -> float:
        """Return the median seconds of the target's verify pass after `context` tokens."""
        engine, nodes, step = self.engine, self.engine.drafter.shape.nodes, self.engine.runner.device_step
        length = torch.full((engine.batch,), context, device=engine.device)
        positions = length[:, None] + torch.arange(nodes, device=engine.device)
        slots = torch.arange(context + nodes, device=engine.device)
        caches = engine.target.caches(engine.batch, len(slots))
        all_visible = torch.ones_like(positions[..., None] == positions[:, None])

        def verify() -> None:
            visible = step.mask(slots, length, all_visible)
            inputs = positions % 2, positions, positions, visible, caches, engine.drafter.aux_layers
            x, _ = engine.target(*inputs)
            step.draw(engine.target.logits(x), None)

        with engine.runner.threads():
            return bench.median_seconds(captured(verify, engine.device), engine.device, repeat)


class SlotBatch:
    """An engine with continuous batching."""

    def __init__(self, engine: Engine):
        self.engine, self.prompt_seconds, prefill = engine, 0.0, engine.runner.prefill

        def timed(*args) -> torch.Tensor:
            start_time = time.perf_counter()
            result = prefill(*args)
            self.prompt_seconds += time.perf_counter() - start_time
            return result

        engine.runner.prefill = timed
        engine.warm_up(Sampling(), Sampling(temperature=1.0))

    def answer(
        self, prompts: list[list[int]], sampling: list[Sampling], batch_size: int
    ) -> tuple[list[list[int]], float, float, Counter]:
        """Decode prompts, `batch_size` at a time.

        Return ids, seconds, the seconds of prefill included in these, and the number of steps by tree.
        """
        engine, requests, before = self.engine, [], self.prompt_seconds
        synchronize(engine.device)
        start_time = time.perf_counter()
        while engine.busy or len(requests) < len(prompts):
            while engine.batch - engine.free < batch_size and len(requests) < len(prompts):
                requests.append(engine.admit(prompts[len(requests)], sampling[len(requests)]))
            engine.step()
        synchronize(engine.device)
        seconds, prefill_seconds = time.perf_counter() - start_time, self.prompt_seconds - before
        trees = sum((r.trees for r in requests), Counter())
        return [r.ids for r in requests], seconds, prefill_seconds, trees


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture a call over static tensors as a CUDA graph; on a CPU return the call itself."""
    if device.type != "cuda":
        return call
    return partial(CapturedCalls(device, log_stderr), ("call",), call, nullcontext)


def load(
    checkpoint: str | None = None, shape: str | None = None, mode: str | None = None, **runtime
) -> Model:
    """Load a converted target, or create one of a shape with random weights.

    mode: of a shape's weights, see `shapes.random_models`. runtime: fields of `engine.target.Runtime`.
    """
    if checkpoint:
        return Model(load_target(checkpoint, Runtime(**runtime), log_stderr))
    settings = Runtime(**runtime)
    settings.prepare()
    torch.manual_seed(0)
    weights, head = random_models(shape, settings.torch_dtype or torch.bfloat16, settings.device_name, mode)
    target = on_backend(Target(Path(shape), settings, weights, {"stop_ids": []}, None, log_stderr), None)
    target.prepare_models(head, quantize=mode is None)
    return Model(target, head)


def plain_modules(checkpoint: str | None, shape: str | None = None, **runtime) -> Transformer:
    """Return a target with PyTorch's modules, for comparison with other programs."""
    return load(checkpoint, shape, compile=False, **runtime).weights


def encode_all(checkpoint: str, questions: list[str]) -> list[list[int]]:
    """Encode questions like `Model.encode`, without loading a model."""
    tokenizer = Tokenizer.load(checkpoint)
    return [encode(tokenizer, question) for question in questions]
