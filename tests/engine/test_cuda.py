"""On a GPU: the output of every drafter through CUDA graphs equals plain output in float32; in bfloat16 the
first tokens do. A step is one graph launch without synchronization; memory does not grow.
"""
import os

import pytest
import torch
from helpers import ROOT
from helpers.decoding import check_outputs
from helpers.drafters import NAMES, make_drafter

from checkpoint.load import load_head
from engine.engine import Engine
from engine.sampling import Sampling
from engine.target import Runtime, Target, load_target

SMOLLM2 = ROOT / os.environ.get("CHECKPOINT", "checkpoints/smollm2-135m")
pytestmark = [
    pytest.mark.compile, pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TEXT = "The tide comes in and the tide goes out; why does the tide come in, and why does the tide go out? "
OPTIONS = {"batch": 2, "max_seq_len": 400, "chunks": (64,)}
SAMPLINGS = [[Sampling(80, temperature, seed=seed) for seed in range(3)] for temperature in (0.0, 1.0)]


@pytest.fixture(scope="module")
def subject(golden, request) -> tuple[Target, list[list[int]], list]:
    """Return (target on the GPU, prompts, plain requests for each of SAMPLINGS) of a model and dtype."""
    model, dtype = request.param
    folder = SMOLLM2 if model == "smollm2" else golden
    if not folder.is_dir():
        pytest.skip("the demo checkpoint is not there: run `make fetch`")
    target = load_target(folder, Runtime("cuda", dtype, kv="fp8" if model == "tiny fp8" else "auto"))
    prompts = [target.tokenizer.encode(text) for text in (TEXT, TEXT * 2 + "The", "hello world")]
    decoder = Engine(target.model, **OPTIONS)
    return target, prompts, [decoder.generate(prompts, samplings) for samplings in SAMPLINGS]


# The demo model has one head; its 30 layers take long to compile.
COUPLED = [name for name in NAMES if name != "plain"]  # output is determined by the seed
MODELS = {"tiny": COUPLED, "tiny fp8": ("eagle3",), "smollm2": ("eagle3", "lookup")}
CASES = [
    pytest.param((model, dtype), name, id=f"{model}-{dtype}-{name}")
    for model, names in MODELS.items() for dtype in ("float32", "bfloat16") for name in names
]


@pytest.mark.parametrize("subject, name", CASES, indirect=["subject"])
def test_speculative_equals_plain(subject, name):
    (target, prompts, plain), heads, allocated = subject, {}, None
    for kind in ("eagle3", "eagle"):
        if (target.checkpoint / kind).is_dir():
            heads[kind] = load_head(target.checkpoint / kind, target.model, kind)
            target.prepare_models(heads[kind])
    drafter = make_drafter(name, target.model, heads.get("eagle3"), heads.get("eagle"), target.prepare_models)
    engine = Engine(target.model, drafter, **OPTIONS)
    for samplings, expected in zip(SAMPLINGS, plain):
        requests = engine.generate(prompts, samplings)
        if target.model.embed.dtype == torch.float32 and target.runtime.kv == "auto":
            jobs = list(zip(prompts, samplings))
            check_outputs([r.ids for r in requests], [r.ids for r in expected], jobs)
        else:  # near ties may differ
            assert [r.ids[0] for r in requests] == [r.ids[0] for r in expected]
        engine.generate(prompts, samplings)
        assert allocated is None or torch.cuda.memory_allocated() <= allocated + 2**20
        allocated = torch.cuda.memory_allocated()
    check_capture(engine, prompts)


def check_capture(engine: Engine, prompts: list[list[int]]) -> None:
    """Check that prefill and step are captured, and that a step is one launch without synchronization."""
    from torch.profiler import ProfilerActivity, profile

    assert {key[0] for key in engine.runner.captured.graphs} == {"prefill", "step"}
    requests = [engine.admit(prompt, SAMPLINGS[0][0]) for prompt in prompts[: engine.batch]]
    while not all(request.ids for request in requests):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                engine._launch(engine.slots.requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profiled.events()]
    assert sum(name.startswith("cudaGraphLaunch") for name in names) == 3
    assert not [name for name in names if name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))]
