"""What is compiled once is found again, by the next call, object and process; a compiled step is the step."""

import pytest
import torch
import torch.nn as nn
from helpers import GOLDEN
from helpers.decoding import check_texts, ids, plain, prompts, replay, shape_of, speculative
from helpers.drafters import make_drafter
from shapes import random_models

from engine.compile import compile_graph, saved_place
from engine.engine import Engine
from engine.passes import SLOT_STEP
from engine.step import accept_and_commit, draft_and_verify
from kernels.build import code_digest
from sampling.options import Sampling
from tree import TreeShape

pytestmark = [pytest.mark.compile, pytest.mark.slow]


class Compiling(Exception):
    """Something is about to be compiled that is to be found, or that need not be waited for."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


class Adder(nn.Module):
    def __init__(self, by: int = 2, dtype=torch.float32):
        super().__init__()
        self.by = by
        self.register_buffer("total", torch.zeros(3, dtype=dtype), persistent=False)
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def test_the_place_depends_on_all_that_is_compiled_in(cache, monkeypatch):
    def where(adder=None, n=7, twice=False, function=draft_and_verify):
        torch._dynamo.mark_dynamic(numbers := torch.arange(64)[:n], 0)
        return saved_place(function, (adder or Adder(), numbers, twice))

    same = where()
    assert same == where(n=20)  # the length is dynamic
    wider, tied = Adder(), Adder()
    wider.total = torch.zeros(4)
    tied.total = tied.weight
    others = [
        where(Adder(3)), where(Adder(dtype=torch.float64)), where(wider), where(tied), where(twice=True),
        where(function=accept_and_commit)
    ]
    for name, value in {
        "torch.get_num_threads": lambda: 77, "engine.compile.features": lambda: frozenset({"another"}),
        "engine.compile._gpu": lambda args: ("another",), "engine.compile.code_digest": str,
    }.items():
        with monkeypatch.context() as m:
            m.setattr(name, value)
            others.append(where())
    for changed in (0.0, 1.0):  # the code has changed since two processes began, which run other code than it
        with monkeypatch.context() as m:
            m.setattr("kernels.build.IMPORTED", changed)
            m.setattr("engine.compile.code_digest", code_digest.__wrapped__)
            others.append(where())
    assert len({same, *others}) == len(others) + 1
    assert same == where()


@pytest.fixture(scope="module")
def compiled(models, tmp_path_factory):
    """make(shape, say) -> an engine whose compiled steps are kept for the next one."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("steps")))
        yield lambda shape, say: speculative(models, shape, compile=True, say=say)


TRACE = GOLDEN / "eagle3.T8D2K3.p2.safetensors"


def test_the_compiled_step(models, compiled):
    """The reference's trees; plain texts of many lengths without another compilation; found again."""
    from torch._dynamo.utils import counters

    said: list[str] = []
    engine = compiled(shape_of(TRACE), said.append)
    replay(engine, TRACE)
    assert any("compiling the step" in line for line in said)
    before, made = counters["stats"]["unique_graphs"], [
        (prompt, Sampling(12 + i)) for i, prompt in enumerate(prompts(12, seed=12, longest=230))
    ]
    wanted = [ids(plain(models), [prompt], sampling)[0] for prompt, sampling in made]
    check_texts([ids(engine, [prompt], sampling)[0] for prompt, sampling in made], wanted, made)
    assert counters["stats"]["unique_graphs"] == before

    def stop(line: str) -> None:
        raise Compiling(line)

    replay(compiled(shape_of(TRACE), stop), TRACE)
    with pytest.raises(Compiling, match="compiling the "):
        ids(compiled(TreeShape(5, 1, 2), stop), [[1, 2]], Sampling(4))


@pytest.mark.parametrize("whole_first, name", ((False, "plain"), (True, "eagle3 window")))
def test_a_span_may_be_all_slots(whole_first, name):
    """One graph serves every span, the longest too: a cache that ended there would be another layout to
    dynamo (batches of two and more failed).
    """
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    passes = Engine(target, drafter, batch=2, max_seq_len=300).passes
    passes.state.length.fill_(30)
    passes.state.limit.fill_(299)
    passes.state.done.fill_(False)
    torch._dynamo.reset()
    graph, spans = compile_graph(draft_and_verify, backend="aot_eager"), [2 * SLOT_STEP, passes.slots]
    arguments = passes.device_step, target, passes.caches, passes.drafter, passes.state
    for i, size in enumerate(reversed(spans) if whole_first else spans):
        slots = passes.slot_ids[:size]
        torch._dynamo.mark_dynamic(slots, 0)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(i)):
            accept_and_commit(*arguments, graph(*arguments, slots, False), False)
    assert all(length >= 32 for length in passes.state.length.tolist())
