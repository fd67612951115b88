"""--kv int8 from end to end: text, memory, and what is measured for it."""
import pytest
import torch

from drafters import Drafting
from drafters.eagle import Eagle
from engine.runtime import Runtime
from engine.target import load_target
from kernels.packed import ByteCaches
from sampling.options import Sampling
from tree import TreeShape

pytestmark = pytest.mark.compile
PROMPT = [256, *b"Once upon a time"]


@pytest.fixture(scope="module", params=("bf16", "fp32"))
def targets(request, golden):
    """The target with an int8 cache and with one in its dtype."""
    return [load_target(golden, Runtime("cpu", request.param, kv=kv)) for kv in ("int8", "auto")]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_text_is_plain_text(targets, temperature):
    """Over two blocks of slots, and with a batch; the cache is the int8 one, and it makes a difference."""
    target, usual = targets
    plain, fast = (
        target.engine(drafting, batch=2, max_seq_len=220)
        for drafting in (Drafting(), Drafting("eagle3", tree=TreeShape(12, 2, 4)))
    )
    assert isinstance(fast.passes.caches, ByteCaches)
    prompts, sampling = [PROMPT, PROMPT[3:]], [Sampling(180, temperature, seed=seed) for seed in (1, 2)]
    found = [decoder.generate(prompts, sampling) for decoder in (plain, fast)]
    assert [o.ids for o in found[0]] == [o.ids for o in found[1]]
    assert max(map(len, (o.ids for o in found[0]))) > 150
    logits = [logits_after(t.model) for t in targets]
    assert not torch.equal(*logits) and (logits[0] - logits[1]).abs().max() < 0.1 * logits[1].abs().max()


@torch.no_grad()
def logits_after(model):
    """The logits after PROMPT, read through caches."""
    own = torch.arange(len(PROMPT))[None]
    x, _ = model(torch.tensor([PROMPT]), own, own, own <= own[..., None], model.caches(1, len(PROMPT)))
    return model.logits(x)


def test_memory_is_what_the_caches_take(targets):
    for target in targets:
        decoder = target.engine(batch=2, max_seq_len=300)
        assert decoder.cache_bytes == sum(b.nbytes for b in decoder.passes.caches.buffers())


def test_a_head_keeps_its_dtype(targets):
    drafter = targets[0].engine(Drafting("eagle3", tree="4,2,2"), max_seq_len=100).drafter
    assert isinstance(drafter, Eagle) and not isinstance(drafter.caches, ByteCaches)
