"""What is compiled once is found again, by the next call and process; a compiled step is the step."""
import pytest
import torch
from helpers import GOLDEN
from helpers.decoding import check_texts, ids, plain, prompts, replay, shape_of, speculative
from helpers.drafters import make_drafter
from shapes import random_models

from engine import graphs
from engine.engine import Engine
from engine.graphs import compile_graph
from engine.runner import SLOT_STEP
from engine.step import accept_and_commit, draft_and_verify
from sampling.options import Sampling
from tree import TreeShape

pytestmark = [pytest.mark.compile, pytest.mark.slow]


@pytest.fixture(scope="module")
def compiled(models, tmp_path_factory):
    """make(shape, say) -> an engine whose compiled steps are kept for the next one."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("steps")))
        yield lambda shape, say: speculative(models, shape, compile=True, log=say)


TRACE = GOLDEN / "eagle3.T8D2K3.p2.safetensors"


def test_the_compiled_step(models, compiled):
    """The reference's trees; requests of many lengths without another compilation; the caches of torch hold
    what the next process needs.
    """
    from torch._dynamo.utils import counters

    said: list[str] = []
    engine = compiled(shape_of(TRACE), said.append)
    counters.clear()
    replay(engine, TRACE)
    assert [line.split()[2] for line in said if line.endswith("...")] == ["prefill", "step", "commit"]
    assert counters["stats"]["unique_graphs"] == 3, "plain decoding is not compiled"
    made = [(prompt, Sampling(12 + i)) for i, prompt in enumerate(prompts(12, seed=12, longest=230))]
    wanted = [ids(plain(models), [prompt], sampling)[0] for prompt, sampling in made]
    check_texts([ids(engine, [prompt], sampling)[0] for prompt, sampling in made], wanted, made)
    assert counters["stats"]["unique_graphs"] == 3

    counters.clear()
    torch._dynamo.reset()
    replay(compiled(shape_of(TRACE), said.append), TRACE)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    assert not counters["inductor"]["fxgraph_cache_miss"]


def test_one_graph_for_all_slots_and_chunks(models, monkeypatch):
    """Views of another slot of the batch, and prompt chunks of another size, are not compiled again."""
    compile_graph, made = graphs.compile_graph, []

    def counted(function, **options):
        made.append(function.__name__)
        return compile_graph(function, **options, backend="aot_eager")

    monkeypatch.setattr(graphs, "compile_graph", lambda function, options: counted(function))
    engine = speculative(models, TreeShape(5, 1, 2), compile=True, batch=2, counts=(2,), chunks=(16, 64))
    requests = [(prompt, Sampling(5)) for prompt in prompts(3, seed=3, longest=90)]
    wanted = [ids(plain(models), [prompt], sampling)[0] for prompt, sampling in requests]
    texts, samplings = zip(*requests)
    check_texts(ids(engine, texts, samplings), wanted, requests)
    assert sorted(made) == ["accept_and_commit", "draft_and_verify", "prefill", "prefill"]


@pytest.mark.parametrize("whole_first, name", ((False, "plain"), (True, "eagle3 window")))
def test_a_span_may_be_all_slots(whole_first, name):
    """One graph serves every span, the longest too: a cache that ended there would be another layout to
    dynamo (batches of two and more failed).
    """
    target, head = random_models("tiny", torch.float32, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    runner = Engine(target, drafter, batch=2, max_seq_len=300).runner
    runner.state.length.fill_(30)
    runner.state.limit.fill_(299)
    runner.state.done.fill_(False)
    torch._dynamo.reset()
    graph, spans = compile_graph(draft_and_verify, backend="aot_eager"), [2 * SLOT_STEP, runner.slots]
    arguments = runner.device_step, target, runner.caches, runner.drafter, runner.state
    for i, size in enumerate(reversed(spans) if whole_first else spans):
        slots = runner.slot_ids[:size]
        torch._dynamo.mark_dynamic(slots, 0)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=bool(i)):
            accept_and_commit(*arguments, graph(*arguments, slots, False), False)
    assert all(length >= 32 for length in runner.state.length.tolist())
