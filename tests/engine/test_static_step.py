"""Requirements of CUDA graph capture, tested on a CPU: no synchronization, frozen sequences."""
import contextlib
import gc
import weakref
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from helpers.decoding import OPTIONS, ids, prompts, speculative
from helpers.drafters import cases, make_drafter, small_models
from shapes import SHAPES, random_models
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import graphs
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.graphs import CapturedCalls, CompiledFunction
from engine.sampling import Modes, Sampling
from engine.step import Step
from kernels.choose import choose_backend
from model import ModelArgs
from tree import TreeShape

aten = torch.ops.aten
# What brings a number to the host, or has a result whose size only the device knows.
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
MODES = {"greedy": Modes(), "everything": Modes(True, True, True, True, True)}


class Watched(TorchDispatchMode):
    """Records operators that must not run in a step that is to be captured."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.seen = device, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in WAITS:
            self.seen.append(str(operator))
        if operator in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.append(f"{operator} by a mask")
        result = operator(*args, **kwargs or {})
        for x in tree_leaves((args, result)):
            if isinstance(x, torch.Tensor) and x.device.type != self.device and x.ndim:
                self.seen.append(f"{operator} takes or gives a tensor on {x.device}")
        return result


class Uploads(TorchFunctionMode):
    """Records tensors that are made from host values: copied to the device, not computed on it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        index = args[1] if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        if function in (torch.tensor, torch.as_tensor, torch.from_numpy) or any(
            isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,))
        ):
            self.seen.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", cases())
def test_step_does_not_synchronize(name, modes):
    """On the meta device, where tensors have no values: an operator that needs one raises, unless `Watched`
    finds it first.
    """
    target, head = random_models("tiny", torch.bfloat16, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None).to("meta")
    engine = Engine(target.to("meta"), drafter, batch=2, max_seq_len=300, compile=False)
    runner = engine.runner
    group, live_slots = runner.slot_range(0, 2), runner.live_slots(64)
    for run in (
        lambda: runner.step(group, live_slots, drafter, modes),
        lambda: runner.prefill(group, live_slots, 64, modes),
    ):
        with torch.no_grad(), Watched("meta") as watched, Uploads() as uploads:
            run()
        assert not watched.seen + uploads.seen


@pytest.mark.parametrize("name", cases())
def test_frozen_sequences_do_not_change(name):
    """A step captured in the middle of decoding changes neither the state nor the drafter."""
    target, head = small_models(128, layers=4)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False)
    texts, samplings = prompts(3, longest=60), [Sampling(12), Sampling(12, 1.0, seed=1), Sampling(12)]
    alone = ids(engine, texts, samplings)
    requests, runner, held = [], engine.runner, 0
    for event in engine.run(texts, samplings, requests):
        if len(event.request.accept_lengths) not in (1, 2, 3) or engine.free:
            continue
        kept = {
            name: buffer.clone()
            for name, buffer in (*engine.state.named_buffers(), *drafter.named_buffers())
            if "caches" not in name and name != "out"  # drafted rows of caches are overwritten
        }
        with runner.frozen(), torch.no_grad():
            for one in (drafter, runner.plain):
                runner.step(runner.slot_range(0, 3), runner.live_slots(120), one, Modes(sampled=True))
        now = dict([*engine.state.named_buffers(), *drafter.named_buffers()])
        changed = [name for name, before in kept.items() if not torch.equal(before, now[name])]
        assert kept and not changed
        held += 1
    assert held and [r.ids for r in requests] == alone


def test_no_host_uploads(models):
    """Indexing with a Python list, or a tensor made from one, would synchronize on a GPU."""
    target, head = models
    engine = Engine(target, HeadDrafter(head, TreeShape(6, 2, 2)), batch=3, max_seq_len=100, compile=False)
    engine.runner.captured = lambda key, call, still: call()
    for i in range(3):
        engine.admit([5, 6 + i], Sampling(40))
    while engine.slots.decoding < 3:
        engine.step()
    with torch.no_grad(), Uploads() as uploads:
        engine._launch(engine.slots.requests), engine.slots.swap(0, 2)
    assert not uploads.seen


# -- memory of a pass over a chunk of a long prompt grows with the text, not with its square -----------------


CHUNK, VOCABULARY, GROUP = 64, 509, 2  # GROUP query heads share a key/value head
PATHS = ("PyTorch", pytest.param("kernels", marks=pytest.mark.kernels))


class Made(TorchDispatchMode):
    """Records the sizes in bytes, and the shapes, of all allocated tensors."""

    def __init__(self):
        super().__init__()
        self.bytes, self.shapes = [], set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.bytes.append(x.untyped_storage().nbytes())
                self.shapes.add(tuple(x.shape))
        return result


@torch.no_grad()
def last_chunk(length: int, on_kernels: bool) -> Made:
    """Return the allocations of the last chunk of a prompt, the largest of all because it attends to all
    others.
    """
    shape = ModelArgs(VOCABULARY, 32, 32, 4, GROUP, 1, 16, max_seq_len=2 * length), VOCABULARY, 32
    with patch.dict(SHAPES, narrow=shape):
        target, head = random_models("narrow", torch.float32, "cpu", None)
    if on_kernels:
        assert choose_backend("cpu").prepare(target, head)
    drafter = HeadDrafter(head, TreeShape(8, 2, 3))
    engine = Engine(target, drafter, max_seq_len=length + 2, compile=False, chunks=(CHUNK,))
    request = engine.admit([7] * length, Sampling(1))
    request.prefilled = length - CHUNK
    with Made() as made:
        engine._prefill_chunk()
    assert engine.state.n_unread.tolist() == [1]  # the prompt has been read, and gave a token
    return made


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_a_chunk_grows_with_the_text(path):
    """The largest tensor is the attention mask, chunk rows by slots (for PyTorch's attention in float32 and
    per query head); the total is a few of these.
    """
    short, long = (last_chunk(length, path == "kernels") for length in (8_192, 32_768))
    width = 1 if path == "kernels" else GROUP * 4  # bytes for each row and slot
    for made, length in ((short, 8_192), (long, 32_768)):
        assert width * CHUNK * length <= max(made.bytes) < 1.1 * width * CHUNK * length
        # Logits are made of one row, not of a chunk: at a vocabulary of 128k a row has half a megabyte.
        scored = {shape for shape in made.shapes if shape[-1:] == (VOCABULARY,) and shape[0] != VOCABULARY}
        assert scored and all(torch.Size(shape).numel() == VOCABULARY for shape in scored)
    assert sum(long.bytes) < 4.1 * sum(short.bytes) < 4.1 * 20 * width * CHUNK * 8_192


# -- captured calls, on a stand-in for torch's CUDA graphs: what they keep, and what is done if one fails ----


GPU = torch.device("cuda:1")


class Graph:
    """A fake graph that records calls made during its capture, and keeps no references."""

    def replay(self): ...


class FakeCuda:
    """Stands in for torch.cuda. fails: an error that captures raise."""

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
    """A capture keeps its inputs alive, and garbage collection is off during it. What cannot be captured is
    reported once and called each time; sequences are frozen during the attempt only.
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
    assert lines == ["the step cannot be captured and runs eagerly (operation not permitted)"]
    cuda.fails = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        calls(("prefill", 1), lambda: None, held)
    assert ("prefill", 1) not in calls.graphs and gc.isenabled() and cuda.current is cuda
    cuda.fails = None
    assert calls(("read", 1), lambda: 5, held) == 5 and len(lines) == 1, "the next can be captured"


def test_eager_fallback(monkeypatch):
    lines = []
    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: lambda *args: 1 / 0)
    double = CompiledFunction(lambda x: 2 * x, "double", lines.append, lines.append)
    assert [double("key", torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert lines[1] == "the double cannot be compiled and runs eagerly (division by zero)" and len(lines) == 2


def test_dropping_the_engine_frees_its_caches(models):
    """Without waiting for garbage collection: until then their memory would count as used."""
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


def test_warm_up_is_complete(monkeypatch):
    """After warm-up, a long prompt chunk in the second slot compiles, loads and captures nothing, with any
    option, next to a request with different ones.
    """
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = HeadDrafter(head, TreeShape(8, 3, 4))  # a step commits five tokens: rows of odd sizes
    monkeypatch.setattr(Step, "reads_length", True)  # as on our kernels: one graph for every length
    engine = Engine(
        target, drafter, batch=3, max_seq_len=200, chunks=(64, 128), batch_sizes=(1, 2, 3),
        plain_requests=True)
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
    known, compiled = set(calls), [*engine.runner.passes.values()][:2]
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
