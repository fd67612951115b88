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
from engine.runner import default_batch_sizes
from engine.sampling import Modes, Sampling
from engine.step import Step
from kernels.choose import choose_backend
from model import ModelArgs
from tree import TreeShape

aten = torch.ops.aten
# Operators that copy a value to the host, or whose output size depends on values.
SYNCHRONIZING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
MODES = {"greedy": Modes(), "everything": Modes(True, True, True, True, True)}


class Synchronizations(TorchDispatchMode):
    """Records operators that a captured step must not contain."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.found = device, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in SYNCHRONIZING:
            self.found.append(str(operator))
        if operator in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.found.append(f"{operator} by a mask")
        result = operator(*args, **kwargs or {})
        for x in tree_leaves((args, result)):
            if isinstance(x, torch.Tensor) and x.device.type != self.device and x.ndim:
                self.found.append(f"{operator} takes or returns a tensor on {x.device}")
        return result


class Uploads(TorchFunctionMode):
    """Records calls that copy host values to the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        index = args[1] if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        if function in (torch.tensor, torch.as_tensor, torch.from_numpy) or any(
            isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,))
        ):
            self.found.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", cases())
def test_step_does_not_synchronize(name, modes):
    """On the meta device, where tensors have no values: reading one raises an error if `Synchronizations` did
    not record it.
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
        with torch.no_grad(), Synchronizations("meta") as synchronizations, Uploads() as uploads:
            run()
        assert not synchronizations.found + uploads.found


@pytest.mark.parametrize("name", cases())
def test_frozen_sequences_do_not_change(name):
    """A step in `frozen`, in the middle of decoding, changes neither the state nor the drafter."""
    target, head = small_models(128, layers=4)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False)
    inputs, samplings = prompts(3, longest=60), [Sampling(12), Sampling(12, 1.0, seed=1), Sampling(12)]
    expected = ids(engine, inputs, samplings)
    requests, runner, frozen_steps = [], engine.runner, 0
    for event in engine.run(inputs, samplings, requests):
        if len(event.request.accept_lengths) not in (1, 2, 3) or engine.free:
            continue
        before = {
            name: buffer.clone()
            for name, buffer in (*engine.state.named_buffers(), *drafter.named_buffers())
            if "caches" not in name and name != "out"  # drafted rows of caches are overwritten
        }
        with runner.frozen(), torch.no_grad():
            for x in (drafter, runner.plain):
                runner.step(runner.slot_range(0, 3), runner.live_slots(120), x, Modes(sampled=True))
        after = dict([*engine.state.named_buffers(), *drafter.named_buffers()])
        changed = [name for name, buffer in before.items() if not torch.equal(buffer, after[name])]
        assert before and not changed
        frozen_steps += 1
    assert frozen_steps and [r.ids for r in requests] == expected


def test_no_host_uploads(models):
    """Indexing with a Python list, or a tensor made from one, would synchronize on a GPU."""
    target, head = models
    engine = Engine(target, HeadDrafter(head, TreeShape(6, 2, 2)), batch=3, max_seq_len=100, compile=False)
    engine.runner.captured = lambda key, call, frozen: call()
    for i in range(3):
        engine.admit([5, 6 + i], Sampling(40))
    while engine.slots.decoding < 3:
        engine.step()
    with torch.no_grad(), Uploads() as uploads:
        engine._launch(engine.slots.requests), engine.slots.swap(0, 2)
    assert not uploads.found


# -- memory of a prefill chunk grows with the prompt's length, not with its square ---------------------------


CHUNK, VOCABULARY, GROUP = 64, 509, 2  # GROUP query heads share a key/value head
PATHS = ("PyTorch", pytest.param("kernels", marks=pytest.mark.kernels))


class Allocations(TorchDispatchMode):
    """Records the sizes in bytes, and the shapes, of all allocated tensors."""

    def __init__(self):
        super().__init__()
        self.bytes, self.shapes = [], set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in inputs:
                self.bytes.append(x.untyped_storage().nbytes())
                self.shapes.add(tuple(x.shape))
        return result


@torch.no_grad()
def last_chunk(length: int, on_kernels: bool) -> Allocations:
    """Return the allocations of a prompt's last chunk: the most, as it attends to all others."""
    shape = ModelArgs(VOCABULARY, 32, 32, 4, GROUP, 1, 16, max_seq_len=2 * length), VOCABULARY, 32
    with patch.dict(SHAPES, narrow=shape):
        target, head = random_models("narrow", torch.float32, "cpu", None)
    if on_kernels:
        assert choose_backend("cpu").prepare(target, head)
    drafter = HeadDrafter(head, TreeShape(8, 2, 3))
    engine = Engine(target, drafter, max_seq_len=length + 2, compile=False, chunks=(CHUNK,))
    request = engine.admit([7] * length, Sampling(1))
    request.prefilled = length - CHUNK
    with Allocations() as allocations:
        engine._prefill_chunk()
    assert engine.state.n_unread.tolist() == [1]  # prefill is complete, and the first token sampled
    return allocations


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_a_chunk_is_linear_in_the_prompt_length(path):
    """The largest tensor is the attention mask, chunk tokens by slots (for PyTorch's attention in float32 and
    per query head). All tensors together take less than 20 masks.
    """
    short, long = (last_chunk(length, path == "kernels") for length in (8_192, 32_768))
    mask_bytes = 1 if path == "kernels" else GROUP * 4  # for each token and slot
    for allocations, length in ((short, 8_192), (long, 32_768)):
        size = mask_bytes * CHUNK * length
        assert size <= max(allocations.bytes) < 1.1 * size
        # Logits are computed for one token, not for the chunk: half a megabyte each at a vocabulary of 128k.
        logits = {shape for shape in allocations.shapes
                  if shape[-1:] == (VOCABULARY,) and shape[0] != VOCABULARY}
        assert logits and all(torch.Size(shape).numel() == VOCABULARY for shape in logits)
    assert sum(long.bytes) < 4.1 * sum(short.bytes) < 4.1 * 20 * mask_bytes * CHUNK * 8_192


# -- captured calls, with a fake of torch's CUDA graphs ------------------------------------------------------


GPU = torch.device("cuda:1")


class Graph:
    """A fake graph that records calls made during its capture, and keeps no references."""

    def replay(self): ...


class FakeCuda:
    """Replaces torch.cuda. error: raised by captures, if any."""

    def __init__(self):
        self.garbage = lambda: None
        self.error, self.gc_enabled, self.current, self.recording = None, [], self, set()

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        self.gc_enabled.append(gc.isenabled())
        assert self.garbage() is None, "garbage was not collected before the capture"
        assert pool not in self.recording, "already recording"
        previous, self.current = self.current, stream
        self.recording.add(pool)
        yield
        if self.error:  # like torch, restore nothing
            raise self.error
        self.current = previous
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


def test_captured_calls(cuda):
    """A capture keeps its inputs alive, and garbage collection is off during it. A call that cannot be
    captured is logged once and then runs eagerly; sequences are frozen during the attempt only.
    """
    lines, frozen, calls, x = [], [], [], torch.ones(3)
    captured, alive, cycle = CapturedCalls(GPU, lines.append), weakref.ref(x), Graph()
    cycle.itself, cuda.garbage = cycle, weakref.ref(cycle)
    del cycle

    @contextlib.contextmanager
    def freeze():
        frozen.append(True)
        yield
        frozen.append(False)

    results = [captured(("plain",), lambda x=x: x + 1, freeze).tolist() for _ in range(3)]
    del x
    assert results == [[2.0] * 3] * 3 and alive() is not None, "a replay reads freed memory"
    assert cuda.gc_enabled == [False] and gc.isenabled() and not lines

    cuda.error = RuntimeError("operation not permitted\nmore")
    for _ in range(2):
        captured(("step", 1), lambda: calls.append(frozen[-1]), freeze)
    assert calls == [True] * 3 + [False] * 2 and frozen == [True, False] * 2
    assert lines == ["the step cannot be captured and runs eagerly (operation not permitted)"]
    cuda.error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        captured(("prefill", 1), lambda: None, freeze)
    assert ("prefill", 1) not in captured.graphs and gc.isenabled() and cuda.current is cuda
    cuda.error = None
    assert captured(("read", 1), lambda: 5, freeze) == 5 and len(lines) == 1, "later calls are not captured"


def test_outputs_are_read_after_their_copies(cuda, monkeypatch):
    """Copies to pinned memory start at once and do not block; the host waits for them when it reads."""
    order, empty = [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype).fill_(pin_memory))
    event = SimpleNamespace(
        record=lambda stream: order.append("recorded"), synchronize=lambda: order.append("waited"))
    monkeypatch.setattr("torch.cuda.Event", lambda: event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: cuda)
    copy = torch.Tensor.copy_

    def start(host, x, non_blocking):
        order.append(("copied", int(host.max()), non_blocking))
        return copy(host, x)

    monkeypatch.setattr(torch.Tensor, "copy_", start)
    read = graphs.copy_to_host((torch.tensor([[3, 4]]), torch.tensor([5.0])))
    assert order == [("copied", 1, True)] * 2 + ["recorded"]
    assert read() == [[[3, 4]], [5.0]] and order[3:] == ["waited"]


def test_a_function_that_cannot_be_compiled_runs_eagerly(monkeypatch):
    lines = []
    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: lambda *args: 1 / 0)
    double = CompiledFunction(lambda x: 2 * x, "double", lines.append, lines.append)
    assert [double("key", torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert lines[1] == "the double cannot be compiled and runs eagerly (division by zero)" and len(lines) == 2


def test_deleting_an_engine_frees_its_caches(models):
    """Without garbage collection: until it ran, their memory would count as used."""
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


ADMIT_OPTIONS = ({}, {"plain": True}, {"score_prompt": True}, {"watch": True})


def test_after_an_exhaustive_warm_up_nothing_is_compiled_or_captured(monkeypatch):
    """For prompts of two chunks in the second slot, with any option, next to a request with other options."""
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = HeadDrafter(head, TreeShape(8, 3, 4))  # a step commits five tokens: rows of odd sizes
    monkeypatch.setattr(Step, "reads_length", True)  # as on our kernels: one graph for every length
    engine = Engine(
        target, drafter, batch=3, max_seq_len=200, chunks=(64, 128), batch_sizes=(1, 2, 3),
        plain_requests=True)
    allows_all = SimpleNamespace(error=None, advance=lambda ids: None, mask=lambda tokens, parent, into: None)
    engine.guide = lambda schema: allows_all
    calls, compiled = {}, []
    engine.runner.captured = lambda key, call, frozen: calls.setdefault(key, call)()

    monkeypatch.setattr(
        graphs, "compile_graph", lambda function, options: compiled.append(function) or function)
    logits, shapes = target.logits, set()
    target.logits = lambda x: shapes.add(x.shape) or logits(x)
    engine.warm_up(Sampling(), Sampling(temperature=1.0), exhaustive=True)
    # Compiled for one to three requests, greedy and sampled: verify and commit. For prompts, one graph for
    # all chunks, of one request and of three; on a GPU none.
    assert len(compiled) == 3 * 2 * 2 + 2, compiled
    assert default_batch_sizes(16, captured=True) == (1, 4, 16)  # so a server of 16 slots compiles 12 graphs
    compiled.clear()
    warm_shapes = {*shapes}
    warm_keys, passes = set(calls), [*engine.runner.passes.values()][:2]
    variants = [len(function.graphs) for function in passes]
    plain = engine.admit([1, 2, 3], Sampling(90), plain=True)
    while plain.active:
        engine.step()
    engine.generate([plain.tokens], Sampling(4))  # the head has not read them
    assert not compiled and set(calls) == warm_keys
    for options, admit_options in zip((*OPTIONS, {"json_schema": "{}"}), cycle(ADMIT_OPTIONS)):
        case = options, admit_options
        first = engine.admit([1, 2, 3], Sampling(12, temperature=1.0), plain="logit_bias" in options)
        while not first.ids:
            engine.step()
        second = engine.admit(list(range(1, 66)), Sampling(4, **options), **admit_options)
        assert second.slot == 1
        while second.active or first.active:
            engine.step()
        assert not compiled and set(calls) == warm_keys, case
        assert [len(function.graphs) for function in passes] == variants, case
        assert shapes == warm_shapes, case  # of scored prompts, too
