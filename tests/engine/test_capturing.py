"""Captured calls, on a stand-in for torch's CUDA graphs: what they keep, and what is done if one fails."""
import contextlib
import gc
import weakref
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from helpers.decoding import OPTIONS, ids, speculative
from shapes import random_models

from engine import graphs
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.graphs import CapturedCalls, CompiledFunction
from engine.sampling import Sampling
from engine.step import TORCH
from tree import TreeShape

GPU = torch.device("cuda:1")


class Graph:
    """A graph that knows the calls made while it was captured, and keeps nothing alive."""

    def replay(self): ...


class FakeCuda:
    """Stands in for torch.cuda. fails: captures raise this error."""

    def __init__(self):
        self.garbage = lambda: None
        self.fails, self.collecting, self.current, self.recording = None, [], self, set()

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        self.collecting.append(gc.isenabled())
        assert self.garbage() is None, "what is garbage before a capture is collected before it"
        assert pool not in self.recording, "already recording"
        before, self.current = self.current, stream
        self.recording.add(pool)
        yield
        if self.fails:  # as torch: it undoes nothing
            raise self.fails
        self.current = before
        self.recording.remove(pool)

    def wait_stream(self, other): ...


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", fake.graph)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: FakeCuda())
    monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: fake.current)
    monkeypatch.setattr("torch.cuda.set_stream", lambda stream: setattr(fake, "current", stream))
    for name in ("device", "stream"):
        monkeypatch.setattr(f"torch.cuda.{name}", contextlib.nullcontext)
    graphs._stream.cache_clear()
    yield fake
    graphs._stream.cache_clear()


def test_captures(cuda):
    """A capture keeps its inputs, and nothing collects during it. Of what cannot be captured one line says
    so, and it is called; sequences are held still while it is tried, and not afterwards.
    """
    lines, still, made, x = [], [], [], torch.ones(3)
    calls, seen, loop = CapturedCalls(GPU, lines.append), weakref.ref(x), Graph()
    loop.itself, cuda.garbage = loop, weakref.ref(loop)
    del loop

    @contextlib.contextmanager
    def held():
        still.append(True)
        yield
        still.append(False)

    found = [calls(("plain",), lambda x=x: x + 1, held).tolist() for _ in range(3)]
    del x
    assert found == [[2.0] * 3] * 3 and seen() is not None, "a replay reads memory that was given away"
    assert cuda.collecting == [False] and gc.isenabled() and not lines

    cuda.fails = RuntimeError("operation not permitted\nmore")
    for _ in range(2):
        calls(("step", 1), lambda: made.append(still[-1]), held)
    assert made == [True] * 3 + [False] * 2 and still == [True, False] * 2
    assert lines == ["the step cannot be captured and is launched each time (operation not permitted)"]
    cuda.fails = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        calls(("prefill", 1), lambda: None, held)
    assert ("prefill", 1) not in calls.graphs and gc.isenabled() and cuda.current is cuda
    cuda.fails = None
    assert calls(("read", 1), lambda: 5, held) == 5 and len(lines) == 1, "the next can be captured"


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    lines = []
    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: lambda *args: 1 / 0)
    double = CompiledFunction(lambda x: 2 * x, "double", lines.append, lines.append)
    assert [double("key", torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert lines[1] == "the double cannot be compiled and runs without (division by zero)" and len(lines) == 2


def test_caches_are_free_when_nobody_holds_the_engine(models):
    """Not only once garbage is collected: until then their memory counts as used."""
    gc.collect()
    gc.disable()
    try:
        engine = speculative(models, TreeShape(8, 2, 3))
        ids(engine, [[1, 2, 3]], Sampling(4))
        caches = weakref.ref(engine.runner.caches[0].k)
        del engine
        assert caches() is None
    finally:
        gc.enable()


WAYS = ({}, {"plain": True}, {"score_prompt": True}, {"watch": True})


def test_ready_is_ready(monkeypatch):
    """After warm-up the long chunk of a prompt, in the second place, compiles, loads and captures nothing:
    with any option, beside a text with other ones.
    """
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = HeadDrafter(head, TreeShape(8, 3, 4))  # a step commits five tokens: rows of odd sizes
    monkeypatch.setattr(type(TORCH), "reads_length", True)  # as on our kernels: one graph for every length
    engine = Engine(target, drafter, batch=3, max_seq_len=200, chunks=(64, 128), batch_sizes=(1, 2, 3))
    allows_all = SimpleNamespace(error=None, advance=lambda ids: None, mask=lambda tokens, parent, into: None)
    engine.guide = lambda schema: allows_all
    calls, made = {}, []
    engine.runner.captured = lambda key, call, still: calls.setdefault(key, call)()

    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: made.append("make") or function)
    logits, shapes = target.logits, set()
    target.logits = lambda x: shapes.add(x.shape) or logits(x)
    engine.warm_up(Sampling(), Sampling(temperature=1.0), exhaustive=True)
    # Compiled for one to three requests, greedy and sampled: verify and commit. For prompts, one graph for
    # all chunks, of one request and of three; on a GPU none.
    assert len(made) == 3 * 2 * 2 + 2, made
    made.clear()
    warm = {*shapes}
    known, compiled = set(calls), [engine.runner._prefill, engine.runner._draft_and_verify]
    variants = [len(function.graphs) for function in compiled]
    plain = engine.admit([1, 2, 3], Sampling(90), plain=True)
    while plain.active:
        engine.step()
    engine.generate([plain.tokens], Sampling(4))  # the head has not read them
    assert not made and set(calls) == known
    for options, way in zip((*OPTIONS, {"json_schema": "{}"}), cycle(WAYS)):
        beside = Sampling(12, temperature=1.0)
        drafted = engine.admit([1, 2, 3], beside, plain="logit_bias" in options)
        while not drafted.ids:
            engine.step()
        second = engine.admit(list(range(1, 66)), Sampling(4, **options), **way)
        assert second.slot == 1
        while second.active or drafted.active:
            engine.step()
        assert not made and set(calls) == known, (options, way)
        assert [len(function.graphs) for function in compiled] == variants, (options, way)
        assert shapes == warm, (options, way)  # of prompts that are scored, too
