"""The kernels against plain PyTorch in float64, and what they promise: a row's result never depends on its
company.
"""
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import networks.eagle
from checkpoint.loading import load_head, load_model
from drafters.eagle import Eagle
from engine.decoder import Decoder
from kernels import cpu
from kernels.packed import ByteCache, PackedLinear, pack_models
from kernels.quantized import QuantizedLinear, round_inputs
from model import MLP, KVCache, ModelArgs, Pass, Transformer, attention, inverse_frequencies
from networks.eagle import Eagle3Head
from networks.head import HeadArgs
from sampling.options import Sampling
from sampling.restrict import restrict
from tree import TreeShape

pytestmark = pytest.mark.compile
DTYPES = (torch.float32, torch.bfloat16)
# Of one product, relative to the largest: rounding of the output.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    cpu.load_kernels()


# For the kernels alone. A whole model runs with the processor's best.
with_each_isa = pytest.mark.usefixtures("each_isa")


def draws(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


def close(found, expected, dtype):
    assert (found.double() - expected).abs().max() <= ERROR[dtype] * expected.abs().max()


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", (1, 31, 32, 75))
@pytest.mark.parametrize("rows", (1, 5, 12, 13, 40))
def test_linear(dtype, columns, rows):
    draw = draws(rows)
    x, weight, bias = draw(2, rows, 38, dtype=dtype), draw(columns, 38, dtype=dtype), draw(columns)
    onto = draw(2, rows, columns, dtype=dtype)
    packed, expected = cpu.pack(weight, 4 // dtype.itemsize), x.double() @ weight.double().T
    close(cpu.linear(x, packed, columns), expected, dtype)
    close(cpu.linear(x, packed, columns, None, bias, onto), expected + bias + onto, dtype)
    exact = cpu.linear(x, packed, columns, mode=cpu.FLOAT32)
    assert exact.dtype == torch.float32
    close(exact, expected, torch.float32)
    assert torch.equal(
        cpu.linear(x.transpose(0, 1), packed, columns), cpu.linear(x, packed, columns).transpose(0, 1)
    )


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", (16, 24, 100))
def test_gated(dtype, inner):
    draw = draws(inner)
    x, weight = draw(3, 7, 38, dtype=dtype) * 3, draw(2 * inner, 38, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    packed = cpu.pack(weight, 4 // dtype.itemsize, gated=True)
    close(cpu.linear(x, packed, inner, mode=cpu.GATED), F.silu(gate) * up, dtype)


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode, inputs, group", (
    ("int8", 128, 0), ("int4", 128, 32), ("int4", 128, 64), ("w8a8", 128, 0), ("w8a8", 100, 0),
    ("w4a8", 96, 32), ("w4a8", 192, 64), ("w4a8", 256, 128),
))
@pytest.mark.parametrize("rows", (1, 2, 3, 7, 12, 21))
@pytest.mark.parametrize("gated", (False, True))
def test_quantised(dtype, mode, inputs, group, rows, gated):
    """Exactly the product of what x is rounded to (w8a8, w4a8) with the weight that the quantised one stands
    for, and row-invariant.
    """
    draw = draws(rows)
    layer = QuantizedLinear.of(draw(90, inputs), mode, group)
    x, onto = draw(rows, inputs, dtype=dtype), draw(rows, 45 if gated else 90, dtype=dtype)
    x[0, :64] = 0
    read = round_inputs(x.float(), group or 64) if mode in ("w8a8", "w4a8") else x
    expected = read.double() @ layer.dequantize(torch.float64).T
    packed = PackedLinear(layer, dtype, gated)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    else:
        close(packed.logits(x), expected, torch.float32)
    whole = packed(x)
    close(whole, expected, dtype)
    close(packed(x, onto), expected + onto, dtype)
    assert all(torch.equal(packed(x[i : i + 2]), whole[i : i + 2]) for i in range(rows))


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 16, 50, 576))
def test_rms_norm(dtype, size):
    draw = draws(size)
    x, weight = draw(2, 5, size, dtype=dtype), draw(size, dtype=dtype)
    close(cpu.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (size,), weight.double(), 1e-5), dtype)


def attend_case(dtype, B, T, heads, kv_heads, head_dim, n, norms, seed=0):
    draw = draws(seed)
    args = ModelArgs(8, heads * head_dim, 8, 1, heads, kv_heads, head_dim, qk_norm=norms)
    qkv = draw(B, T, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    k, v = draw(B, n + 3, kv_heads, head_dim, dtype=dtype), draw(B, n + 3, kv_heads, head_dim, dtype=dtype)
    slots = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(b))[:T] for b in range(B)])
    visible = draw(B, T, n) > -0.5
    visible.scatter_(2, slots[..., None], True)  # a row sees itself
    weights = (draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype), 1e-5) if norms else ()
    return args, qkv, k, v, slots, visible, weights


def in_dtype(k, v):
    """Caches k, v that hold k, v [B, S, nkv, hd] as they are."""
    return k.clone(), v.clone()


def in_bytes(k, v):
    """Caches k, v in bytes that hold k, v [B, S, nkv, hd]."""
    B, S, nkv, hd = k.shape
    cache = ByteCache(B, S, ModelArgs(8, nkv * hd, 8, 1, nkv, nkv, hd), k.dtype, "cpu")
    qkv = torch.cat((k, k, v), 2).flatten(2)
    slots = torch.arange(S).expand(B, -1)
    straight = torch.ones(B, S, hd // 2)
    cpu.attend(qkv, straight, 0 * straight, cache.k, cache.v, slots, torch.eye(S).bool().expand(B, -1, -1))
    return cache.k, cache.v


as_stored = pytest.mark.parametrize("stored", (in_dtype, in_bytes))
SHAPES = pytest.mark.parametrize("shape", (
    (1, 1, 4, 4, 32, 5, False), (2, 7, 6, 2, 64, 70, False), (1, 16, 9, 3, 64, 129, True),
    (3, 5, 8, 1, 128, 33, True),
    (1, 3, 5, 5, 96, 8, False), (2, 6, 4, 2, 16, 40, True), (1, 4, 2, 1, 80, 20, False),
    (1, 2, 2, 2, 6, 9, True), (1, 5, 3, 1, 100, 17, False), (2, 4, 6, 3, 64, 430, False),
))


class Written:
    """A cache of k, v [B, S, nkv, hd] to write to, as the functions `keep` rounds them."""

    def __init__(self, k, v, keep=lambda x: x):
        self.k, self.v, self.keep = keep(k), keep(v), keep

    def write(self, k, v, slots):
        rows = torch.arange(len(slots))[:, None]
        self.k[rows, slots], self.v[rows, slots] = self.keep(k), self.keep(v)


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_attend(dtype, shape):
    args, qkv, k, v, slots, visible, weights = attend_case(dtype, *shape)
    positions = slots + 100
    block = Transformer(args).layers[0].to(dtype)
    if weights:
        block.q_norm.weight.data, block.k_norm.weight.data = weights[:2]
        block.q_norm.eps = block.k_norm.eps = 1e-5

    ours, theirs = Written(k.clone(), v.clone()), Written(k.double(), v.double())
    shared = Pass(args, inverse_frequencies(args), positions, slots, visible)
    torch.set_num_threads(2)
    cos, sin = shared.angles()
    found = cpu.attend(qkv, cos, sin, ours.k, ours.v, slots, visible, *weights)
    torch.set_num_threads(1)
    assert torch.equal(
        found, cpu.attend(qkv, cos, sin, ours.k, ours.v, slots, visible, *weights)
    )
    expected = attention(block.double(), qkv.double(), theirs, shared)
    assert torch.equal(ours.v.double(), theirs.v)
    close(ours.k, theirs.k, dtype)
    assert (found.double() - expected).abs().max() <= 2 * ERROR[dtype] * expected.abs().max()


def round_heads(x):
    """Each head of x [..., hd] in steps of its largest / 127."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_attend_over_bytes(dtype, shape):
    """Attention over rounded keys and values, but for the rounding of queries and softmax weights: to about
    1/8000 of the largest where they have 16 bits, 1/127 where they have 8.
    """
    args, qkv, k, v, slots, visible, weights = attend_case(dtype, *shape)
    block = Transformer(args).layers[0].to(dtype)
    if weights:
        block.q_norm.weight.data, block.k_norm.weight.data = weights[:2]
        block.q_norm.eps = block.k_norm.eps = 1e-5
    shared = Pass(args, inverse_frequencies(args), slots + 100, slots, visible)
    cos, sin = shared.angles()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(cpu.attend(qkv, cos, sin, *in_bytes(k, v), slots, visible, *weights))
    torch.set_num_threads(1)
    assert torch.equal(*found)
    theirs = Written(k.double(), v.double(), round_heads)
    expected = attention(block.double(), qkv.double(), theirs, shared)
    coarse = cpu.quantized_bytes_per_word() == 4
    error = (found[0].double() - expected).abs()
    assert error.max() <= (0.05 if coarse else 0.012) * expected.abs().max()
    assert error.square().mean().sqrt() <= (0.012 if coarse else 0.003) * expected.abs().max()


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_never_depends_on_its_company(dtype):
    """Bit for bit: any subset of rows, any number of threads."""
    draw = draws(3)
    x, weight, norm = draw(40, 96, dtype=dtype), draw(70, 96, dtype=dtype), draw(96, dtype=dtype)
    per_word = 4 // dtype.itemsize
    packed, gated = cpu.pack(weight, per_word), cpu.pack(weight, per_word, gated=True)
    for compute in (
        lambda x: cpu.linear(x, packed, 70), lambda x: cpu.linear(x, packed, 70, mode=cpu.FLOAT32),
        lambda x: cpu.linear(x, gated, 35, mode=cpu.GATED), lambda x: cpu.rms_norm(x, norm, 1e-6),
    ):
        whole = compute(x)
        for first in range(40):
            for count in (1, 2, 3, 7, 8, 11, 12, 13, 25):
                assert torch.equal(compute(x[first : first + count]), whole[first : first + count])
        torch.set_num_threads(3)
        threaded = compute(x)
        torch.set_num_threads(1)
        assert torch.equal(threaded, whole)


@with_each_isa
@as_stored
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_never_depends_on_where_the_slots_lie(dtype, stored):
    """A path of a tree, its slots scattered among other nodes', gives the bits of the same tokens side by
    side.
    """
    args, qkv, k, v, _, _, _ = attend_case(dtype, 1, 4, 6, 2, 64, 90, False)
    cos, sin = draws(1)(1, 4, 32).cos(), draws(2)(1, 4, 32).sin()
    results = []
    for places in ((50, 51, 52, 53), (50, 57, 63, 80)):
        slots = torch.tensor([places])
        visible = torch.zeros(1, 4, 90, dtype=torch.bool)
        visible[:, :, :50] = True
        for i in range(4):
            visible[:, i, list(places[: i + 1])] = True
        for threads in (1, 3):  # by themselves, or sharing slots and parts of heads
            torch.set_num_threads(threads)
            results.append(cpu.attend(qkv, cos, sin, *stored(k, v), slots, visible))
        torch.set_num_threads(1)
    assert all(torch.equal(results[0], other) for other in results[1:])


@with_each_isa
@as_stored
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("committed", (120, 127, 128, 300))
# Groups that end between rows, and within one; heads that are whole words, and not.
@pytest.mark.parametrize("heads, kv_heads, hd", ((6, 2, 32), (8, 1, 20), (3, 3, 6)))
def test_a_path_across_blocks_of_slots(dtype, stored, committed, heads, kv_heads, hd):
    """A tree whose nodes' slots lie on both sides of the end of a block of summation, against each of its
    paths alone, row by row, as plain decoding would: the same bits on 1, 2, 3 and 5 threads.
    """
    parents = (-1, 0, 0, 1, 1, 2, 3, 5, 6, 8, 9, 10)  # of each node; node i is at slot committed + i
    T, n = len(parents), committed + 40
    draw = draws(committed)
    qkv = draw(1, T, (heads + 2 * kv_heads) * hd, dtype=dtype)
    cos, sin = draw(1, T, hd // 2).cos(), draw(1, T, hd // 2).sin()
    k, v = draw(1, n, kv_heads, hd, dtype=dtype), draw(1, n, kv_heads, hd, dtype=dtype)
    visible = torch.zeros(1, T, n, dtype=torch.bool)
    visible[:, :, :committed] = True
    paths = []
    for node in range(T):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        visible[0, node, [committed + i for i in path]] = True
        paths.append(path)
    own = torch.arange(committed, committed + T)[None]
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append(cpu.attend(qkv, cos, sin, *stored(k, v), own, visible))
    torch.set_num_threads(1)
    assert all(torch.equal(found[0], other) for other in found[1:])
    for path in paths:
        keys, values = stored(k, v)
        for depth, node in enumerate(path):
            seen = torch.zeros(1, 1, n, dtype=torch.bool)
            seen[:, :, : committed + depth + 1] = True
            row = slice(node, node + 1)
            slot = torch.tensor([[committed + depth]])
            alone = cpu.attend(qkv[:, row], cos[:, row], sin[:, row], keys, values, slot, seen)
        assert torch.equal(alone[0, 0], found[0][0, path[-1]])


@with_each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_before_or_after_slots(dtype):
    """In memory, as a cache's strides say: attention and moves are the same."""
    args, qkv, k, v, slots, visible, _ = attend_case(dtype, 2, 5, 6, 2, 32, 150, False)
    shared = Pass(args, inverse_frequencies(args), slots, slots, visible)
    source, target = torch.tensor([[3, 9, 4], [7, 8, 0]]), torch.tensor([[9, 1, 2], [8, 7, 5]])
    found = []
    for caches in ([k.clone(), v.clone()], [c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v)]):
        attended = cpu.attend(qkv, *shared.angles(), *caches, slots, visible)
        before = [c.clone() for c in caches]
        cpu.move(caches[:1], caches[1:], 32, source, target)
        for cache, old in zip(caches, before):
            expected = old.clone()
            for b in range(2):
                expected[b, target[b]] = old[b, source[b]]
            assert torch.equal(cache, expected)
        found.append((attended, *caches))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@with_each_isa
@pytest.mark.parametrize("hd", (6, 20, 64))
def test_moving_slots_in_bytes(hd):
    """A cache after a move is the cache of what has been moved."""
    k, v = draws(1)(2, 150, 3, hd), draws(2)(2, 150, 3, hd)
    source, target = torch.tensor([[3, 9, 140], [7, 128, 0]]), torch.tensor([[9, 130, 2], [128, 7, 5]])
    moved = in_bytes(k, v)
    cpu.move(moved[:1], moved[1:], hd, source, target)
    rows = torch.arange(2)[:, None]
    for x in (k, v):
        x[rows, target] = x[rows, source]
    assert all(map(torch.equal, moved, in_bytes(k, v)))


@with_each_isa
def test_scores_of_any_size():
    """Softmax weights that differ by more than floats can tell apart, over several blocks."""
    draw, n = draws(5), 400
    qkv = draw(1, 2, 3 * 16) * 30
    k, v = draw(1, n, 1, 16) * 30, draw(1, n, 1, 16)
    visible = torch.ones(1, 2, n, dtype=torch.bool)
    visible[0, 1, 10:] = False
    zero = torch.zeros(1, 2, 8)
    slots = torch.tensor([[8, 9]])
    found = cpu.attend(qkv, zero.cos(), zero, k, v, slots, visible)
    q = qkv[:, :, :16].double()
    scores = (q @ k[:, :, 0].double().transpose(1, 2) / 4).masked_fill(~visible, float("-inf"))
    assert scores.max() > 1000
    close(found, scores.softmax(-1) @ v[:, :, 0].double(), torch.float32)


@with_each_isa
@pytest.mark.parametrize("top_k", (0, 1, 5, 300, 1000))
@pytest.mark.parametrize("top_p", (1.0, 0.9, 0.5, 1e-6))
def test_restrict(top_k, top_p):
    logits = draws(top_k)(3, 3, 300) * 4
    logits[0, 0, :7] = logits[0, 0].max()  # ties, also of the two zeros
    logits[0, 1, :9], logits[0, 1, 4:6], logits[0, 2, 50:] = 0.0, -0.0, float("-inf")
    requests = torch.tensor([0.7, 1.3, 0.0]), torch.full((3,), top_k), torch.full((3,), top_p)
    assert torch.equal(cpu.restrict(logits, *requests), restrict(logits, *requests))


def product():
    """A product that several threads share, and its result."""
    draw = draws(1)
    x, packed = draw(5, 256), cpu.pack(draw(900, 256), 1)
    return lambda: cpu.linear(x, packed, 900)


def test_callers_side_by_side():
    """Several threads of Python call at once, and the number of threads changes meanwhile."""
    multiply = product()
    expected = multiply()
    torch.set_num_threads(3)

    def work(seed):
        return all(torch.equal(multiply(), expected) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, i) for i in range(8)]
        for count in (2, 5, 3, 1):
            torch.set_num_threads(count)
            assert torch.equal(multiply(), expected)
        assert all(result.result(timeout=120) for result in results)
    torch.set_num_threads(1)


def test_a_forked_process_has_threads_of_its_own():
    multiply = product()
    torch.set_num_threads(2)
    expected = multiply()
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(multiply(), expected) else 1)
    torch.set_num_threads(1)
    assert os.waitpid(child, 0)[1] == 0


def test_pytorch_has_one_thread_while_ours_have_all():
    torch.set_num_threads(3)
    with pytest.raises(KeyboardInterrupt), cpu.alone():
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


def tiny(dtype, seed=0, head_dim=32, of_head=None, **options):
    """A random target and EAGLE-3 head."""
    torch.manual_seed(seed)
    size = {
        "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": head_dim
    }
    target = Transformer(ModelArgs(num_layers=6, max_seq_len=512, **size, **options))
    of_head = {"num_layers": 1, "draft_vocab_size": 96, **(of_head or {})}
    head = Eagle3Head(HeadArgs(target_hidden_size=64, aux_layers=(2, 3, 4), **size, **of_head))
    head.draft_ids.copy_(torch.randperm(160)[: head.args.draft_vocab_size].sort().values)
    for p in [*target.parameters(), *head.parameters()]:
        p.data = (
            torch.randn(p.shape) * 0.25
        ).to(dtype) if p.dim() > 1 else torch.rand(p.shape).to(dtype) + 0.5
    target.requires_grad_(False), head.requires_grad_(False)
    head.use_target(target)
    return target.eval(), head.eval()


@pytest.mark.parametrize("options", ({}, {"tie_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True}))
def test_a_packed_model_is_the_model(options):
    target, head = tiny(torch.float32, **options)
    prompt = list(range(3, 40))
    shape = TreeShape(12, 3, 4)

    def decode():
        return Decoder(
            target, Eagle(head, shape), compile=False, max_seq_len=200
        ).generate([prompt], Sampling(80))[0]

    tokens = torch.randint(0, 160, (2, 30))
    before, logits = decode(), target.logits(target.causal(tokens)[0])
    pack_models(target, head)
    assert isinstance(target.layers[0].wo, PackedLinear) and isinstance(target.lm_head, PackedLinear)
    assert isinstance(head.fc, PackedLinear)
    after = decode()
    assert after.ids == before.ids and after.accept_lengths == before.accept_lengths
    found = target.logits(target.causal(tokens)[0])
    assert (found - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("cache", (KVCache, ByteCache))
@pytest.mark.parametrize("head_dim", (32, 6, 100))
def test_speculative_text_is_plain_text_in_any_dtype(dtype, temperature, cache, head_dim):
    """Six prompts, 150 tokens, on models so flat that bfloat16 ties abound: on plain PyTorch half of the
    texts part.
    """
    target, head = tiny(dtype, head_dim=head_dim)
    assert pack_models(target, head)
    target.Cache = cache
    prompts = [list(range(i, i + 10 + 7 * i)) for i in range(1, 7)]
    sampling = [Sampling(150, temperature, 0.9 + 0.1 * (i % 2), 40 * (i % 3), seed=i) for i in range(6)]
    plain = Decoder(target, compile=False, max_seq_len=300).generate(prompts, sampling)
    for shape in (TreeShape(2, 0, 1), TreeShape(12, 3, 4), TreeShape(40, 4, 6)):
        fast = Decoder(
            target, Eagle(head, shape), batch=3, compile=False, max_seq_len=300
        ).generate(prompts, sampling)
        assert [o.ids for o in fast] == [o.ids for o in plain]


def test_what_the_kernels_cannot_take_is_left_alone():
    target, head = tiny(torch.float16)
    assert not pack_models(target, head)
    assert not any(isinstance(m, PackedLinear) for m in target.modules())
    # 9 values in a row: no pairs.
    odd = Transformer(ModelArgs(20, 12, 9, 1, 2, 1, 6)).to(torch.bfloat16).requires_grad_(False)
    assert not pack_models(odd)
    assert isinstance(odd.layers[0].mlp, MLP) and isinstance(odd.layers[0].wo, PackedLinear)
    assert len(Decoder(odd, compile=False, max_seq_len=60).generate([[1, 2]], Sampling(20))[0].ids) == 20


@pytest.mark.slow
def test_a_model_that_is_partly_on_the_kernels_is_compiled(monkeypatch, tmp_path):
    """Attention and norms on the kernels, experts in PyTorch: in float32 the text of plain PyTorch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    target = Transformer(ModelArgs(160, 64, 64, 2, 4, 2, 16, num_experts=4, experts_per_token=2))
    target.requires_grad_(False).eval()

    def decode(compile):
        decoder = Decoder(target, max_seq_len=80, compile=compile)
        return decoder.generate([list(range(3, 20))], Sampling(30))[0].ids

    expected = decode(False)
    assert not pack_models(target) and isinstance(target.layers[0].wo, PackedLinear)
    assert decode(True) == decode(False) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_head, whole", (
    ({}, True), ({"num_layers": 3}, True), ({"recycle_normed": True}, True), ({"own_embedding": True}, True),
    ({"own_lm_head": False, "draft_vocab_size": 160}, True), ({"norm_before_residual": True}, False),
))
def test_a_heads_pass_is_one_operator(dtype, of_head, whole):
    """The bits of its parts one after the other, in its caches too. One variant stays in parts."""
    target, head = tiny(dtype, of_head=of_head)
    pack_models(target, head)
    assert (head.run is not networks.eagle.run_head) == whole and head.score is not networks.eagle.score_rows
    feature = torch.randn(2, 5, 64).to(dtype)
    tokens, positions = torch.randint(0, 160, (2, 5)), torch.arange(10).view(2, 5) % 7
    slots = torch.arange(5).expand(2, -1)
    visible = torch.rand(2, 5, 9) < 0.5
    visible[..., 0] = True
    found = []
    for run, score in ((head.run, head.score), (networks.eagle.run_head, networks.eagle.score_rows)):
        head.run, head.score = run, score
        caches = head.caches(2, 9, dtype, "cpu")
        x = head(tokens, feature, positions, slots, visible, caches)
        found.append([x, head.logits(x), *caches.buffers()])
    assert found[0][1].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_decoding_on_the_kernels(golden):
    """As users run it: in float32 the reference path's text, in bfloat16 plain text. Nothing is compiled."""
    said = []
    prompt, shape = [256, *b"Once upon a time"], TreeShape(12, 2, 4)
    target, _ = load_model(golden)
    head = load_head(golden / "eagle3", target, "eagle3")
    expected = Decoder(
        target, Eagle(head, shape), compile=False, max_seq_len=120
    ).generate([prompt], Sampling(60))[0]
    pack_models(target, head)
    decoder = Decoder(target, Eagle(head, shape), max_seq_len=120, say=said.append)
    found = decoder.generate([prompt], Sampling(60))[0]
    assert not said and found.ids == expected.ids and found.accept_lengths == expected.accept_lengths

    target, _ = load_model(golden, dtype=torch.bfloat16)
    head = load_head(golden / "eagle3", target, "eagle3")
    pack_models(target, head)
    plain, fast = Decoder(target, max_seq_len=200), Decoder(target, Eagle(head, shape), max_seq_len=200)
    for seed in range(6):
        sampling = Sampling(150, 1.0, seed=seed)
        assert fast.generate([prompt], sampling)[0].ids == plain.generate([prompt], sampling)[0].ids
