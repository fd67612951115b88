"""Compilation is cached across calls and processes; compiled steps equal eager steps."""
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


def test_compiled_step(small):
    """Its trees equal those of the eager step; requests of many lengths do not recompile; a second process
    finds everything in torch's caches, which earlier runs may have filled.
    """
    from torch._dynamo.utils import counters

    lines: list[str] = []
    made = [(prompt, Sampling(12 + i)) for i, prompt in enumerate(short_prompts(12, longest=230))]
    first = made[0][0], Sampling(30)
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
    wanted = [ids(plain(small), [prompt], sampling)[0] for prompt, sampling in made]
    check_outputs([ids(engine, [prompt], sampling)[0] for prompt, sampling in made], wanted, made)
    assert counters["stats"]["unique_graphs"] == 3

    counters.clear()
    torch._dynamo.reset()
    compiled()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    assert not counters["inductor"]["fxgraph_cache_miss"]


def test_one_graph_for_all_slots_and_chunks(small, monkeypatch):
    """Neither another slot of the batch nor another prompt chunk size recompiles."""
    compile_graph, made = graphs.compile_graph, []

    def counted(function, **options):
        made.append(function.__name__)
        return compile_graph(function, **options, backend="aot_eager")

    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: counted(function))
    engine = speculative(small, SHAPE, compile=True, batch=2, batch_sizes=(2,), chunks=(16, 64))
    requests = [(prompt, Sampling(5)) for prompt in short_prompts(3, longest=90)]
    wanted = [ids(plain(small), [prompt], sampling)[0] for prompt, sampling in requests]
    texts, samplings = zip(*requests)
    check_outputs(ids(engine, texts, samplings), wanted, requests)
    assert sorted(made) == ["accept_and_commit", "draft_and_verify", "prefill", "prefill"]


@pytest.mark.parametrize("whole_first, name", ((False, "plain"), (True, "eagle3 window")))
def test_live_slots_may_be_all_slots(whole_first, name):
    """One graph serves every number of live slots, including all of them: a view of the whole cache has
    another layout for dynamo, which failed for batches of two and more.
    """
    target, head = small_models(layers=4)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    runner = Engine(target, drafter, batch=2, max_seq_len=300).runner
    runner.state.length.fill_(30)
    runner.state.limit.fill_(299)
    runner.state.done.fill_(False)
    torch._dynamo.reset()
    graph, sizes = compile_graph(draft_and_verify, backend="aot_eager"), [2 * SLOT_STEP, runner.cache_slots]
    arguments = runner.device_step, target, runner.caches, runner.drafter, runner.state
    for i, size in enumerate(reversed(sizes) if whole_first else sizes):
        slots = runner.slot_ids[:size]
        torch._dynamo.mark_dynamic(slots, 0)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(i)):
            accept_and_commit(*arguments, graph(*arguments, slots, False), False)
    assert all(length >= 32 for length in runner.state.length.tolist())
