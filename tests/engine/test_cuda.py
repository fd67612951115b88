"""What only a GPU can show: equal text through captured graphs, one launch and no synchronisation a step, no
growing memory.
"""
import pytest
import torch

from checkpoint.loading import load_head, load_model
from drafters.eagle import Eagle
from engine.engine import DRAFTED, Engine
from kernels.choose import choose_backend
from kernels.quantized import Scheme, quantize_linears
from sampling.options import Sampling
from tree import TreeShape

pytestmark = [
    pytest.mark.compile, pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPTS = [list(b"u:tell me\na:"), list(b"u:why\na:") * 20, list(b"hello world")]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def decoders(golden, request):
    """(plain, EAGLE-3) on the GPU, compiled and captured, and the dtype."""
    target, _ = load_model(golden, "cuda", request.param)
    head = load_head(golden / "eagle3", target, "eagle3")
    choose_backend("cuda").prepare(target, head)
    options = {"batch": 3, "max_seq_len": 700}
    return Engine(target, **options), Engine(
        target, Eagle(head, TreeShape(24, 4, 5)), **options
    ), request.param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_text_is_plain_text(decoders, temperature):
    """In float32 token for token; in bfloat16 rounding may decide near ties otherwise, so the first tokens
    only.
    """
    plain, fast, dtype = decoders
    sampling = [Sampling(300, temperature, seed=i) for i in range(3)]
    a, b = ([o.ids for o in d.generate(PROMPTS, sampling)] for d in (plain, fast))
    if dtype == torch.float32:
        assert a == b
    else:
        assert [ids[0] for ids in a] == [ids[0] for ids in b]
    assert {key[0] for key in fast.passes.captured.graphs} == {"prefill", "step"}


@pytest.mark.parametrize("decoders", [torch.float32], indirect=True)
def test_captured_is_eager(decoders, golden):
    """The graphs compute what the same functions compute without compiling."""
    _, fast, _ = decoders
    eager = Engine(
        fast.target, fast.drafter.__class__(fast.drafter.head, fast.drafter.shape), batch=3, max_seq_len=700,
        compile=False
    )
    assert [
        o.ids for o in eager.generate(PROMPTS, Sampling(100))
    ] == [o.ids for o in fast.generate(PROMPTS, Sampling(100))]


def test_a_step_is_one_launch_and_no_synchronisation(decoders):
    from torch.profiler import ProfilerActivity, profile

    _, fast, _ = decoders
    fast.generate(PROMPTS, Sampling(20))
    requests = [fast.admit(prompt, Sampling(100)) for prompt in PROMPTS]
    while not all(request.ids for request in requests):
        fast.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        # Raises where anything waits; the profiler itself waits at its end.
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                fast._launch(DRAFTED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    names = [e.name for e in seen.events()]
    assert sum(n.startswith("cudaGraphLaunch") for n in names) == 4
    assert not [n for n in names if n.startswith(("cudaLaunchKernel", "cuLaunchKernel"))]
    assert sum("Synchronize" in n for n in names) <= 1  # the profiler's own
    for request in requests:
        fast.leave(request)
    fast.step()


def test_memory_does_not_grow(decoders):
    _, fast, _ = decoders
    fast.generate(PROMPTS, Sampling(300))
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        fast.generate(PROMPTS, Sampling(300))
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("mode, group", [("int8", 0), ("int4", 32), ("w8a8", 0), ("fp8", 0)])
def test_a_quantised_target(golden, mode, group):
    """Its speculative text is its plain text; where activations are rounded, the first tokens: see README."""
    if mode == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply fp8")
    target, _ = load_model(golden, "cuda", torch.float32)
    quantize_linears(target, Scheme(mode, group, mode))
    head = load_head(golden / "eagle3", target, "eagle3")
    quantize_linears(head, Scheme(mode, group, mode))
    choose_backend("cuda").prepare(target, head)
    options = {"batch": 3, "max_seq_len": 700}
    texts = [
        [o.ids for o in Engine(target, drafter, **options).generate(PROMPTS, Sampling(100))]
        for drafter in (None, Eagle(head, TreeShape(24, 4, 5)))
    ]
    if mode in ("fp8", "w8a8"):
        texts = [[ids[0] for ids in text] for text in texts]
    assert texts[0] == texts[1]
