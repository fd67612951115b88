"""torch.compile: compiled steps equal eager steps, and nothing is compiled twice."""
import pytest
import torch
from helpers.decoding import check_outputs, drafts, ids, plain, speculative
from helpers.drafters import make_drafter, short_prompts, small_models

from engine import graphs
from engine.engine import Engine
from engine.graphs import compile_graph
from engine.runner import SLOT_STEP
from engine.sampling import Sampling
from engine.step import accept_and_commit, draft_and_verify
from tree import TreeShape

pytestmark = [pytest.mark.compile, pytest.mark.slow]


SHAPE = TreeShape(6, 2, 2)


@pytest.fixture(scope="module")
def small():
    return small_models()


def test_compiled_step_equals_the_eager_step(small):
    """Requests of many lengths do not recompile. After a reset everything is in torch's caches."""
    from torch._dynamo.utils import counters

    lines: list[str] = []
    jobs = [(prompt, Sampling(12 + i)) for i, prompt in enumerate(short_prompts(12, longest=230))]
    first = jobs[0][0], Sampling(30)
    expected = [draft[:3] for draft in drafts(speculative(small, SHAPE), *first)]
    assert any(len(path) > 2 for *_, path in expected)

    def compiled():
        engine = speculative(small, SHAPE, compile=True, log=lines.append)
        assert [draft[:3] for draft in drafts(engine, *first)] == expected
        return engine

    counters.clear()
    engine = compiled()
    assert [line.split()[2] for line in lines if line.endswith("...")] == ["prefill", "step", "commit"]
    assert counters["stats"]["unique_graphs"] == 3, "plain decoding is not compiled"
    plain_outputs = [ids(plain(small), [prompt], sampling)[0] for prompt, sampling in jobs]
    check_outputs([ids(engine, [prompt], sampling)[0] for prompt, sampling in jobs], plain_outputs, jobs)
    assert counters["stats"]["unique_graphs"] == 3

    counters.clear()
    torch._dynamo.reset()
    compiled()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    assert not counters["inductor"]["fxgraph_cache_miss"]


def test_one_graph_for_all_slots_and_chunks(small, monkeypatch):
    """Neither another slot of the batch nor another prompt chunk size recompiles."""
    compile_graph, compiled = graphs.compile_graph, []

    def recording(function, **options):
        compiled.append(function.__name__)
        return compile_graph(function, **options, backend="aot_eager")

    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: recording(function))
    engine = speculative(small, SHAPE, compile=True, batch=2, batch_sizes=(2,), chunks=(16, 64))
    jobs = [(prompt, Sampling(5)) for prompt in short_prompts(3, longest=90)]
    expected = [ids(plain(small), [prompt], sampling)[0] for prompt, sampling in jobs]
    prompts, samplings = zip(*jobs)
    check_outputs(ids(engine, prompts, samplings), expected, jobs)
    assert sorted(compiled) == ["accept_and_commit", "draft_and_verify", "prefill", "prefill"]


@pytest.mark.parametrize("all_first, name", ((False, "plain"), (True, "eagle3 window")))
def test_one_graph_for_every_number_of_live_slots(all_first, name):
    """Also for all slots: dynamo sees another layout in a view of the whole cache if B >= 2."""
    target, head = small_models(layers=4)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    runner = Engine(target, drafter, batch=2, max_seq_len=300).runner
    runner.state.length.fill_(30)
    runner.state.limit.fill_(299)
    runner.state.done.fill_(False)
    torch._dynamo.reset()
    graph, sizes = compile_graph(draft_and_verify, backend="aot_eager"), [2 * SLOT_STEP, runner.cache_slots]
    arguments = runner.device_step, target, runner.caches, runner.drafter, runner.state
    for i, size in enumerate(reversed(sizes) if all_first else sizes):
        slots = runner.slot_ids[:size]
        torch._dynamo.mark_dynamic(slots, 0)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(i)):
            accept_and_commit(*arguments, graph(*arguments, slots, False), False)
    assert all(length >= 32 for length in runner.state.length.tolist())
