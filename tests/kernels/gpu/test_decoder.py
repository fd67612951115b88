"""Whole steps on the GPU kernels: the reference's trees, and the text of plain decoding by definition."""
import pytest
import torch
from helpers import GOLDEN
from helpers.decoding import ids, plain, prompts, replay, shape_of, speculative

from checkpoint.loading import load_head, load_model
from drafters.draft_model import DraftModel
from drafters.eagle import StaticEagle
from drafters.hydra import Hydra
from drafters.lookahead import Lookahead
from drafters.lookup import Lookup
from engine.decoder import Decoder
from kernels.gpu import here
from kernels.gpu.cache import LayerCache
from kernels.gpu.models import put_on_kernels
from sampling.options import Sampling
from training.new_head import new_multi_token_heads
from tree import EAGLE1_TREE, TreeShape, likely_tree

TRACES = sorted(GOLDEN.glob("eagle?.*.safetensors"))
TOKENS = 60
if here.INTERPRETED:  # slowly
    TRACES, TOKENS = [path for path in TRACES if path.stem == "eagle3.T8D2K3.p2"], 9
SAMPLINGS = [Sampling(TOKENS), Sampling(TOKENS, 1.0, seed=3), Sampling(TOKENS, 0.6, seed=4)]
RESTRICTED = [Sampling(3, 0.8, top_k=20, top_p=0.9, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def on_kernels(golden):
    """(target, EAGLE-3 head, EAGLE-1 head) in float32 on the kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, _ = load_model(golden, device)
    heads = [load_head(golden / kind, target, kind) for kind in ("eagle3", "eagle")]
    put_on_kernels(target, *heads)
    return target, *heads


@pytest.fixture(scope="module")
def texts(golden):
    """Three prompts, and what the target writes by its definition, on a CPU: as SAMPLINGS and RESTRICTED
    say.
    """
    here.want(False)
    target, _ = load_model(golden)
    given, decoder = prompts(3, longest=60), plain((target, None), batch=3)
    written = [ids(decoder, given, samplings) for samplings in (SAMPLINGS, RESTRICTED)]
    here.want(True)
    return given, *written


def hydra(target):
    heads = new_multi_token_heads(target, "hydra", torch.arange(320), 3, 1, True, 0)
    put_on_kernels(heads)
    return Hydra(heads, likely_tree(12, 3))


DRAFTERS = {
    "plain": lambda target, *_: None,
    "eagle3": lambda target, head, _: speculative((target, head), TreeShape(8, 2, 3)).drafter,
    "eagle1": lambda target, _, head: StaticEagle(head, EAGLE1_TREE),
    "draft-model": lambda target, *_: DraftModel(target, TreeShape(4, 2, 1)),
    "hydra": lambda target, *_: hydra(target),
    "lookahead": lambda target, *_: Lookahead(320, 3, 3, 3),
    "lookup": lambda target, *_: Lookup(),
}


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_golden_trace(on_kernels, path):
    target, head3, head1 = on_kernels
    replay(speculative((target, head3 if path.stem.startswith("eagle3") else head1), shape_of(path)), path)


@pytest.mark.parametrize("name", DRAFTERS)
def test_same_seed_same_text(on_kernels, texts, name):
    target = on_kernels[0]
    decoder = Decoder(target, DRAFTERS[name](*on_kernels), batch=3, max_seq_len=300, compile=False)
    assert isinstance(decoder.caches[0], LayerCache)
    assert decoder._span(1) is decoder.slot_ids
    given, written, restricted = texts
    assert ids(decoder, given, SAMPLINGS) == written
    if name == "eagle3":
        assert ids(decoder, given, RESTRICTED) == restricted
