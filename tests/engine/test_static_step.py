"""What a captured step must be, seen without a GPU: it waits for nothing, and it can be held still."""
import contextlib

import pytest
import torch
from helpers.decoding import ids, plain, prompts, speculative
from helpers.drafters import NAMES, make_drafter
from shapes import random_models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.compile import CapturedCalls, compile_graph
from engine.engine import Engine
from engine.passes import SPAN
from engine.step import step
from sampling.options import Modes, Sampling
from tree import TreeShape

aten = torch.ops.aten
# What brings a number to the host, or has a result whose size only the device knows.
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
MODES = {
    "greedy": Modes(), "sampled": Modes(noisy=True), "restricted": Modes(True, True),
    "everything": Modes(True, True, True, True, True),
}


class Watched(TorchDispatchMode):
    """Collects the operators that a step on a device may not call if it is to be captured."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.seen = device, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in WAITS:
            self.seen.append(str(operator))
        if operator in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.append(f"{operator} by a mask")
        result = operator(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type != self.device:
                self.seen.append(f"{operator} gives a tensor on {x.device}")
        return result


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_nothing(name, modes):
    """On the meta device, where nothing has a value: an operator that asks for one fails, if `Watched` does
    not see it first.
    """
    target, head = random_models("tiny", torch.bfloat16, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None).to("meta")
    engine = Engine(target.to("meta"), drafter, batch=2, max_seq_len=300, compile=False)
    passes = engine.passes
    rows, span = passes.rows(0, 2), passes.span(64)
    for run in (
        lambda: passes.step(rows, span, drafter, modes), lambda: passes.prefill(rows, span, 64, modes)
    ):
        with torch.no_grad(), Watched("meta") as watched:
            run()
        assert not watched.seen


@pytest.mark.parametrize("ask", [
    lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x + torch.tensor(1.0),
    lambda x: x.cpu().sum(), lambda x: x.index_put_((x > 0,), torch.zeros(())),
])
def test_what_waits_is_seen(ask):
    with Watched("cpu" if "cpu" not in ask.__code__.co_names else "meta") as watched:
        ask(torch.ones(3))
    assert watched.seen


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_that_is_held_still_stays_what_it_is(models, models1, name):
    """A step captured in the middle of a text changes nothing: neither the state nor what the drafter knows.
    """
    drafter = make_drafter(name, *models, models1[1], lambda heads: None)
    engine = Engine(models[0], drafter, batch=3, max_seq_len=300, compile=False)
    texts, samplings = prompts(3, longest=60), [Sampling(24), Sampling(24, 1.0, seed=1), Sampling(24)]
    alone = ids(engine, texts, samplings)
    requests, passes, held = [], engine.passes, 0
    for event in engine.run(texts, samplings, requests):
        if len(event.request.accept_lengths) not in (3, 4) or len(engine.requests) < 3:
            continue
        kept = {
            name: buffer.clone()
            for name, buffer in (*engine.state.named_buffers(), *drafter.named_buffers())
            if "caches" not in name and name != "out"  # drafted rows of caches are overwritten
        }
        with passes.still(), torch.no_grad():
            for one in (drafter, passes.plain):
                passes.step(passes.rows(0, 3), passes.span(120), one, Modes(noisy=True))
        now = dict([*engine.state.named_buffers(), *drafter.named_buffers()])
        changed = [name for name, before in kept.items() if not torch.equal(before, now[name])]
        assert kept and not changed
        held += 1
    assert held and [r.ids for r in requests] == alone


def test_late_steps_are_neither_waited_for_nor_counted(models):
    """The host reads two steps late, as it does one on a GPU: what runs after the end is not in the books."""
    texts, sampling = prompts(2, seed=4), Sampling(40)
    books = []
    for lag in (0, 2):
        engine = speculative(models, TreeShape(8, 2, 3), batch=2, lag=lag)
        found = engine.generate(texts, sampling)
        books.append([(r.ids, r.accept_lengths, r.trees) for r in found])
        assert all(sum(r.trees.values()) == len(r.accept_lengths) for r in found)
    assert books[0] == books[1]
    assert [ids for ids, _, _ in books[0]] == ids(plain(models, batch=2), texts, sampling)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("whole_first, name", ((False, "plain"), (True, "plain"), (True, "eagle3 window")))
def test_a_span_may_be_all_slots(batch, whole_first, name):
    """One graph serves every span, the longest too: a cache that ended there would be another layout to
    dynamo (batches of two and more failed).
    """
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    passes = Engine(target, drafter, batch=batch, max_seq_len=300).passes
    passes.state.length.fill_(30)
    passes.state.limit.fill_(299)
    passes.state.done.fill_(False)
    torch._dynamo.reset()
    compiled, spans = compile_graph(step, backend="aot_eager"), [2 * SPAN, passes.slots]
    for i, size in enumerate(reversed(spans) if whole_first else spans):
        span = passes.slot_ids[:size]
        torch._dynamo.mark_dynamic(span, 0)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(i)):
            compiled(target, passes.caches, passes.drafter, passes.state, span, False, False)
    assert all(length >= 32 for length in passes.state.length.tolist())


@pytest.fixture
def current(monkeypatch):
    """The GPUs that were made the current one, the last one at the end."""
    made = [torch.device("cuda:0")]

    class On:
        def __init__(self, device):
            self.device = torch.device(device)

        def __enter__(self):
            made.append(self.device)

        def __exit__(self, *_):
            made.pop()

    monkeypatch.setattr(torch.cuda, "device", On)
    return made


def test_passes_that_are_not_captured_run_on_the_models_own_gpu(current):
    """--device cuda:1 in another thread, such as a server's: the current GPU is each thread's own."""
    target, _ = random_models("tiny", torch.float32, "cpu", None)
    passes = Engine(target, max_seq_len=300, compile=False).passes
    passes.device, passes.on_cuda = torch.device("cuda:1"), True
    assert passes.run((), lambda: current[-1]) == torch.device("cuda:1")
    assert current == [torch.device("cuda:0")]


def test_calls_are_captured_on_the_models_own_gpu(monkeypatch, current):
    """--device cuda:1: streams, graphs and replays are those of that GPU, whichever is the current one."""
    seen = []

    class Noted:
        """A stream or a graph, or a context on one."""

        def __init__(self, *_, **__):
            seen.append(current[-1])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def replay(self):
            seen.append(current[-1])

        def wait_stream(self, other):
            pass

    for name in ("Stream", "CUDAGraph", "stream", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Noted)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    captured = CapturedCalls(torch.device("cuda:1"), contextlib.nullcontext)
    for _ in range(2):
        assert captured(("step",), lambda: seen.append(current[-1]) or "result") == "result"
    assert len(seen) > 6 and set(seen) == {torch.device("cuda:1")} and current == [torch.device("cuda:0")]
