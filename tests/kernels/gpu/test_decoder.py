"""Complete steps on the GPU kernels: trees equal the reference, output equals plain decoding in PyTorch."""
import pkgutil
from dataclasses import asdict

import pytest
import torch
from helpers import GOLDEN
from helpers.ahead_of_time import expensive
from helpers.decoding import Trace, draft_steps, ids, plain, prompts, speculative
from helpers.drafters import NAMES, make_drafter, small_models

from checkpoint.load import class_of, load_head, load_model
from drafters.ngram import NGram
from engine import check as checking
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling, restrict
from families.gpt_oss import GptOssArgs
from families.hybrid import Hybrid, HybridArgs
from families.variants import VariantArgs
from kernels.gpu import attention, delta, fallback, products, registers, sampling
from kernels.gpu.cache import LayerCaches
from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.experts import fused_mix
from kernels.quantized import QuantizedLinear
from kernels.scheme import Scheme, quantize_linears, replace_linears
from kernels.stored import Kind
from tree import TreeShape

TRACES = sorted(GOLDEN.glob("eagle?.*.safetensors"))
BATCH, TOKENS, LONGEST, CHUNKS, ROOM = 3, 60, 60, None, 300
COUPLED = NAMES
if INTERPRETED:  # slowly: one trace, and a drafter of each kind of pass
    COUPLED = ("eagle3", *expensive("hydra++", "lookahead"))
    TRACES = expensive(*(path for path in TRACES if path.stem == "eagle3.T8D2K3.p2"))
    BATCH, TOKENS, LONGEST, CHUNKS, ROOM = 2, 5, 20, (16,), 60
SAMPLINGS = [Sampling(TOKENS), Sampling(TOKENS, 1.0, seed=3), Sampling(TOKENS, 0.6, seed=4)][:BATCH]
RESTRICTED = [Sampling(2, 0.8, top_k=20, top_p=0.9, seed=seed) for seed in range(1 if INTERPRETED else BATCH)]


def load(golden, device) -> tuple:
    """Return (target, EAGLE-3 head, EAGLE-1 head) in float32."""
    target, _ = load_model(golden, device)
    return target, *(load_head(golden / kind, target, kind) for kind in ("eagle3", "eagle"))


@pytest.fixture(scope="module")
def subject(golden, device, backend):
    """Models on the kernels, BATCH prompts, and the target's output in PyTorch on a CPU for SAMPLINGS and
    RESTRICTED. In the interpreter the models are smaller.
    """
    on_kernels, (target, *_) = (
        (*small_models(64, 32), None) if INTERPRETED else load(golden, where) for where in (device, "cpu")
    )
    given = [[t % target.args.vocab_size for t in prompt] for prompt in prompts(BATCH, longest=LONGEST)]
    decoder = plain((target, None), batch=BATCH)
    written = [ids(decoder, given[: len(samplings)], samplings) for samplings in (SAMPLINGS, RESTRICTED)]
    backend.prepare(*filter(None, on_kernels))
    return on_kernels, given, *written


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_golden_trace(golden, device, backend, path):
    target, head3, head1 = load(golden, device)
    backend.prepare(target, head3, head1)
    trace, head = Trace(path), head3 if path.stem.startswith("eagle3") else head1
    steps = draft_steps(speculative((target, head), trace.shape), trace.prompt, Sampling(trace.tokens))
    trace.check([(known, draft.tokens, draft.parent) for known, draft in steps])


def unless_interpreted(*cases) -> list:
    """Cases that resemble others; in the slow interpreter they run in `make test-all` only."""
    return expensive(*cases) if INTERPRETED else [*cases]


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


@pytest.mark.parametrize("name", ("Gemma", "gpt-oss", *unless_interpreted("Qwen3.5")))
def test_tiny_families(device, backend, name):
    """Output on the kernels equals PyTorch, plain and with prompt lookup."""
    args = FAMILIES[name]
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
        assert ids(decoder, given[: len(RESTRICTED)], RESTRICTED) == restricted


# -- the self-check: right kernels pass, and each planted fault is found and left out ------------------------


def lowest(logits, *restrictions):
    """`sampling.thresholds` in PyTorch."""
    kept = restrict(logits, *restrictions)
    return kept.masked_fill(kept.isneginf(), torch.inf).amin(-1)


@pytest.fixture
def runner(device, backend, monkeypatch):
    """A ModelRunner of a random int8 target and head, for two requests."""
    if INTERPRETED:  # slowly
        monkeypatch.setattr(attention, "gpu_of", lambda device: gpu_of(device)._replace(multiprocessors=1))
        monkeypatch.setattr(sampling, "thresholds", lowest)
    monkeypatch.setattr(checking, "MAX_CONTEXT", 66)
    target, head = small_models(64, 32)
    quantize_linears(head.to(device), Scheme("int8", 0, None))
    backend.prepare(target.to(device), head)
    drafter = HeadDrafter(head, TreeShape(5, 1, 3))
    yield Engine(target, drafter, batch=2, max_seq_len=150, compile=False, chunks=(16,)).runner
    fallback.disabled.clear()


def check(runner) -> list[str]:
    """Run the self-check and return the lines it logs."""
    lines = []
    runner.fell_back = lines.append
    before = {name: x.clone() for name, x in runner.state.named_buffers()}
    checking.check(runner, [Sampling(temperature=1.0)])
    assert all(torch.equal(x, before[name]) for name, x in runner.state.named_buffers())
    assert fallback.observer is None
    return lines


def test_right_kernels_pass(runner):
    assert not check(runner) and not fallback.disabled


@pytest.mark.expensive
def test_states_are_checked(device, backend, monkeypatch):
    """Of a target with a DeltaNet layer: a wrong state is detected although it changes no output of this
    pass.
    """
    monkeypatch.setattr(checking, "MAX_CONTEXT", 66)
    target = Hybrid(HybridArgs(
        64, 32, 48, 2, 4, 2, 16, delta_layers=(1, 0), delta_heads=2, delta_key_heads=1, delta_key_dim=8,
        delta_value_dim=12, delta_taps=4,
    )).requires_grad_(False)
    for x in target.parameters():
        x.normal_(std=0.2)
    backend.prepare(target.to(device))
    runner = Engine(target, None, batch=2, max_seq_len=150, compile=False, chunks=(16,)).runner
    assert not check(runner)
    right = delta.delta

    def wrong(*args):
        out = right(*args)
        args[4][0, 0, 0] += 1
        return out

    monkeypatch.setattr(delta, "delta", wrong)
    (line,) = check(runner)
    fallback.disabled.clear()
    assert line.startswith("kernel 'delta' falls back to PyTorch, which is slower: ")


def no_launch(*args):
    raise RuntimeError("out of resource: shared memory\nmore")


@pytest.mark.parametrize("part, kernel, wrong", (  # what a wrong kernel does to its result
    ("attend", "kernels.gpu.cache.attend", lambda y, a: y * (1 + (a[8] == 63).any())),
    ("linear", "kernels.gpu.products.linear", no_launch),
    *unless_interpreted(
        ("linear", "kernels.gpu.products.linear", lambda y, a: y + 1e-3),
        ("rank", "kernels.gpu.sampling.top_k", lambda y, a: (y[0], y[1].flip(-1))),
        ("restrict", "kernels.gpu.sampling.thresholds", lambda y, a: y + 10.0),
    ),
))
def test_a_wrong_kernel_is_left_out(runner, monkeypatch, part, kernel, wrong):
    """Its PyTorch definition is used instead; the step is correct and still captured."""
    right = pkgutil.resolve_name(kernel)
    monkeypatch.setattr(kernel, lambda *a: wrong(right(*a), a))
    (line,) = check(runner)
    assert line.startswith(f"kernel {part!r} falls back to PyTorch, which is slower: ")
    assert fallback.disabled == {part} and runner.device_step.reads_length == (part != "attend")


def test_a_wrong_step_is_launched_uncompiled(runner, monkeypatch):
    """If capture or compilation is at fault: a replay that reads freed memory, for example."""
    monkeypatch.setattr(runner, "captured", lambda key, call, still: broken(call()))

    def broken(result):
        runner.caches[1].k[:, 63:] += 0.5
        return result

    (line,) = check(runner)
    assert line.startswith("the captured step gives wrong results; steps now run eagerly: layer 1: ")
    assert runner.captured is None and not fallback.disabled and not check(runner)


@pytest.mark.parametrize("what, wrong", (
    ("kernels.gpu.cache.LayerCaches.move", lambda right, a: None),
    *unless_interpreted(
        ("kernels.gpu.backend.CudaStep.draw", lambda right, a: (right(*a) - 1).clamp(min=0))),
))
def test_errors_of_the_whole_step(runner, monkeypatch, what, wrong):
    """Accepted rows that are not moved, tokens that are not the argmax."""
    right = pkgutil.resolve_name(what)
    monkeypatch.setattr(what, lambda *a: wrong(right, a))
    (line,) = check(runner)
    assert line.startswith("the captured step gives wrong results; steps now run eagerly: ")


def test_ranks_leave_out_what_fails_on_any(runner, monkeypatch):
    sent = []

    class Ranks:
        def all_gather(self, x):
            sent.append(x)
            return torch.stack((x, x.new_tensor([part == "rank" for part in fallback.KERNELS])))

    runner.target.ranks = Ranks()
    assert checking.failed_on_any_rank(runner, {"attend": "wrong"}) == ["attend", "rank"]


@pytest.mark.parametrize("four", (False, True))
def test_the_layout_of_weights_is_inverted(four):
    weight = torch.randint(0, 256, (3, 70, 96), dtype=torch.uint8)
    weight = weight if four else weight.view(torch.int8)
    words = torch.stack([registers.to_register_order(x) for x in weight])
    assert torch.equal(registers.from_register_order(words, 70, 192 if four else 96, four), weight)


@pytest.mark.parametrize("mode", ("q4", "q6", "q8"))
def test_a_few_rows_are_restored(mode):
    """A tied embedding is stored in register order too; a pass reads a few of its rows."""
    layer = QuantizedLinear(256, 300, False, Kind(mode, 32, 256, minima=mode == "q4"))
    layer.weight.random_(*(-128, 128) if layer.weight.dtype == torch.int8 else (0, 256))
    layer.scale.normal_()
    layer.codes.random_(1, 64)
    rows = torch.tensor([[0, 5, 299], [130, 127, 128]])
    want = layer.dequantize(torch.float32, rows)
    products.reorder(layer)
    assert torch.equal(layer.dequantize(torch.float32, rows), want)
    assert torch.equal(layer.dequantize(torch.float32)[rows], want)


def test_lost_keys_are_seen_in_bfloat16():
    """32 of 3,000 keys are missing: an absolute tolerance of 2e-2 would not notice."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 128, generator=draw).bfloat16() for n in (8, 3000, 3000))
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q.float(), k.float(), v.float()).bfloat16()
    right, wrong = attend(q, k, v), attend(q, k[:, :, 32:], v[:, :, 32:])
    limit = checking.KERNEL_EPS * torch.finfo(torch.bfloat16).eps
    assert (wrong - exact).abs().max() < 2e-2 and checking.difference("keys", wrong, exact, limit).ratio > 3
    assert checking.difference("keys", right, exact, limit).ratio < 0.5
