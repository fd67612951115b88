"""--kv fp8 on PyTorch and --kv int8 on the kernels: text, memory, each thing that is done with a cache."""
from itertools import pairwise

import pytest
import torch
from helpers.decoding import check_texts

from drafters import Drafting
from engine.request import Request
from engine.runtime import Runtime
from engine.target import load_target
from kernels.float8 import Float8Caches, from_bytes, to_bytes
from kernels.packed import ByteCaches
from model import KVCaches, ModelArgs, buffer_bytes
from sampling.options import Sampling
from tree import TreeShape

ARGS = ModelArgs(32, 64, 32, 3, 4, 2, 20)
SMALL = {"fp8": Float8Caches, "int8": ByteCaches}
PROMPT = [256, *b"Once upon a time"]


@pytest.fixture(scope="module", params=[
    pytest.param((kv, dtype), marks=marks, id=f"{kv} {dtype}") for kv, dtype, marks in (
        ("fp8", "bf16", ()), ("fp8", "fp32", pytest.mark.slow), ("int8", "bf16", pytest.mark.kernels),
        ("int8", "fp32", pytest.mark.kernels),
    )
])
def targets(request, golden):
    """The target with a cache in bytes and with one in its dtype; the class of the first one's caches."""
    kv, dtype = request.param
    found = [load_target(golden, Runtime("cpu", dtype, compile=kv == "int8", kv=x)) for x in (kv, "auto")]
    return *found, SMALL[kv]


@torch.no_grad()
def logits_after(model):
    """The logits after PROMPT, read through caches."""
    own = torch.arange(len(PROMPT))[None]
    x, _ = model(torch.tensor([PROMPT]), own, own, own <= own[..., None], model.caches(1, len(PROMPT)))
    return model.logits(x)


def test_text_is_plain_text(targets):
    """Two texts, one sampled, over two blocks of slots, with accepted paths that leave gaps. The cache is in
    bytes, which shows in the logits.
    """
    target, usual, kind = targets
    drafting = Drafting("eagle3", tree=TreeShape(12, 2, 4))
    plain, fast = (target.engine(d, batch=2, max_seq_len=220) for d in (Drafting(), drafting))
    assert type(fast.passes.caches) is kind
    given, sampling = [PROMPT, PROMPT[3:]], [Sampling(130), Sampling(130, 1.0, seed=2)]
    requests: list[Request] = []
    events = [*fast.run(given, sampling, requests, watch=True)]
    wanted = [output.ids for output in plain.generate(given, sampling)]
    check_texts([request.ids for request in requests], wanted, list(zip(given, sampling)))
    paths = [event.draft.path[: len(event.ids)] for event in events if event.draft]
    assert any(b - a > 1 for path in paths for a, b in pairwise(path))  # what is moved is not side by side
    logits, exact = (logits_after(t.model) for t in (target, usual))
    assert not torch.equal(logits, exact) and (logits - exact).abs().max() < 0.15 * exact.abs().max()


def filled(kind: type, seed: int = 1):
    """Caches of three layers with 40 slots, written once with random numbers; and these, as rounded."""
    draw = torch.Generator().manual_seed(seed)
    caches, slots = kind.of(ARGS, 2, 40, torch.float32, "cpu", None), torch.arange(40).expand(2, 40)
    for cache in caches:
        k, v = (torch.randn(2, 40, 2, 20, generator=draw) * 9 for _ in range(2))
        rounded = [from_bytes(to_bytes(x), torch.float32) for x in (k, v)]
        cache.write(*(rounded if kind is KVCaches else (k, v)), slots)
    return caches


def same(ours, defined) -> bool:
    """Whether caches hold what those of the definition do, and give it in their dtype."""
    return all(
        torch.equal(a, b) for one, other in zip(ours, defined)
        for a, b in zip(one.live(33, torch.float32), other.live(33, torch.float32))
    )


def test_each_thing_that_is_done_with_a_cache():
    """As with `KVCaches`, whose numbers are rounded before they are written."""
    both = ours, defined = [filled(kind) for kind in (Float8Caches, KVCaches)]
    assert same(*both) and ours[0].k.dtype == torch.uint8
    source, target = torch.tensor([[9, 5, 7], [30, 31, 4]]), torch.tensor([[5, 6, 7], [31, 4, 5]])
    for caches in both:
        KVCaches.move(caches, source, target)
    assert same(*both) and not same(ours, filled(KVCaches))
    parts = [caches.rows(1, 1) for caches in both]
    for caches in parts:
        KVCaches.move(caches, source[:1], target[:1])
    assert same(*parts) and same(*both)
    for caches in both:
        for to, kept in zip(caches.sequence(0, 21), caches.sequence(1, 21)):
            to.copy_(kept)
    assert same(*both)
    assert 4 * buffer_bytes(ours) == buffer_bytes(filled(KVCaches))


def test_what_is_too_large_is_the_largest():
    x = torch.tensor([449.0, -1e9, torch.inf, 0.001, 2**-10, torch.nan])
    assert from_bytes(to_bytes(x), x.dtype)[:5].tolist() == [448, -448, 448, 2**-9, 0]
    assert from_bytes(to_bytes(x), x.dtype)[5].isnan()
