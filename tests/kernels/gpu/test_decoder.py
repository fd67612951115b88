"""Whole steps on the GPU kernels: the reference's trees, and the text of plain decoding by definition."""
from dataclasses import asdict

import pytest
import torch
from helpers import GOLDEN
from helpers.ahead_of_time import expensive
from helpers.decoding import ids, plain, prompts, replay, shape_of, speculative
from helpers.drafters import NAMES, make_drafter, small_models

from checkpoint.load import class_of, load_head, load_model
from drafters.ngram import NGram
from engine.engine import Engine
from engine.sampling import Sampling
from families.gpt_oss import GptOssArgs
from families.hybrid import HybridArgs
from families.variants import VariantArgs
from kernels.gpu.cache import LayerCaches
from kernels.gpu.device import INTERPRETED
from kernels.gpu.experts import fused_mix
from kernels.quantized import Scheme, replace_linears

TRACES = sorted(GOLDEN.glob("eagle?.*.safetensors"))
BATCH, TOKENS, LONGEST, CHUNKS, ROOM = 3, 60, 60, None, 300
COUPLED = NAMES
if INTERPRETED:  # slowly: one trace, and a drafter of each kind of pass
    COUPLED = ("eagle3", *expensive("hydra++", "lookahead"))
    TRACES = expensive(*(path for path in TRACES if path.stem == "eagle3.T8D2K3.p2"))
    BATCH, TOKENS, LONGEST, CHUNKS, ROOM = 2, 5, 20, (16,), 60
SAMPLINGS = [Sampling(TOKENS), Sampling(TOKENS, 1.0, seed=3), Sampling(TOKENS, 0.6, seed=4)][:BATCH]
RESTRICTED = [Sampling(2, 0.8, top_k=20, top_p=0.9, seed=seed) for seed in range(BATCH)]


def load(golden, device) -> tuple:
    """(target, EAGLE-3 head, EAGLE-1 head) in float32."""
    target, _ = load_model(golden, device)
    return target, *(load_head(golden / kind, target, kind) for kind in ("eagle3", "eagle"))


@pytest.fixture(scope="module")
def subject(golden, device, backend):
    """Models on the kernels, BATCH prompts, and what the target writes by its definition, on a CPU: as
    SAMPLINGS and RESTRICTED say. In the interpreter the models are smaller.
    """
    on_kernels, (target, *_) = (
        (*small_models(64, 32), None) if INTERPRETED else load(golden, where) for where in (device, "cpu")
    )
    given = [[t % target.args.vocab_size for t in prompt] for prompt in prompts(BATCH, longest=LONGEST)]
    decoder = plain((target, None), batch=BATCH)
    written = [ids(decoder, given, samplings) for samplings in (SAMPLINGS, RESTRICTED)]
    backend.prepare(*filter(None, on_kernels))
    return on_kernels, given, *written


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_golden_trace(golden, device, backend, path):
    target, head3, head1 = load(golden, device)
    backend.prepare(target, head3, head1)
    replay(speculative((target, head3 if path.stem.startswith("eagle3") else head1), shape_of(path)), path)


FAMILIES = {
    "Gemma": VariantArgs(
        64, 32, 48, 3, 4, 2, 16, qk_norm=True, windows=(5, 0, 9), local_rope_base=500.0, query_scalar=24.0,
        activation="gelu_tanh", zero_centred=True, output_norms=True, scaled_embedding=True,
    ),
    "gpt-oss": GptOssArgs(
        64, 32, 32, 2, 4, 2, 16, num_experts=6, experts_per_token=2, windows=(9, 0), sinks=True, biases=True,
        qkv_bias=True, activation="clamped_swiglu",
    ),
    "Qwen3.5": HybridArgs(
        64, 32, 48, 2, 4, 2, 16, qk_norm=True, rotary_dim=8, delta_layers=(1, 0), delta_heads=2,
        delta_key_heads=1, delta_key_dim=8, delta_value_dim=12, delta_taps=4,
    ),
}


@pytest.mark.parametrize("args", FAMILIES.values(), ids=FAMILIES)
def test_tiny_families(device, backend, args):
    """Their text on the kernels is that of the definition, plain and drafted by prompt lookup."""
    torch.manual_seed(0)
    target = class_of({"kind": "target", **asdict(args)})(args).requires_grad_(False).eval()
    experts, recurrent = bool(getattr(args, "num_experts", 0)), hasattr(args, "delta_layers")
    if recurrent:
        for x in target.parameters():
            x.normal_(std=0.2)
    if experts:
        for layer in target.layers:
            replace_linears(layer.mlp, Scheme(None, 0, None, "mxfp4"))
        for name, x in target.named_parameters():
            if x.is_floating_point():
                x.normal_(std=0.2)
            else:
                x.random_(*(121, 126) if name.endswith("scale") else (0, 256))
    options = {"max_seq_len": 60, "compile": False, "chunks": (16,)}
    made = [list(range(3, 23)) + [5, 6]], [Sampling(TOKENS)]
    written = ids(Engine(target, **options), *made)
    backend.prepare(target.to(device))
    assert all((getattr(layer.mlp, "fused", None) is fused_mix) == experts for layer in target.layers)
    for drafter in (None, NGram()):
        engine = Engine(target, drafter, **options)
        attention = engine.runner.caches.groups[0] if recurrent else engine.runner.caches
        assert isinstance(attention, LayerCaches) and ids(engine, *made) == written


@pytest.mark.parametrize("name", COUPLED)
def test_same_seed_same_text(subject, name):
    (target, *heads), given, written, restricted = subject
    drafter = make_drafter(name, target, *heads, target.backend.prepare)
    decoder = Engine(target, drafter, batch=BATCH, max_seq_len=ROOM, compile=False, chunks=CHUNKS)
    assert isinstance(decoder.runner.caches, LayerCaches)
    assert decoder.runner.live_slots(1) is decoder.runner.slot_ids
    assert ids(decoder, given, SAMPLINGS) == written
    if name == "eagle3":
        assert ids(decoder, given, RESTRICTED) == restricted
