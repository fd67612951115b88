"""Targets with gated delta nets: against transformers, drafted and plain, their MTP layers, refusals."""
import random

import pytest
import torch
import torch.nn.functional as F
from helpers.decoding import alone, check_texts, decode, ids, requests
from helpers.drafters import make_drafter
from helpers.families import LAYERS, H, V, greedy
from helpers.heads import make_head, write_head
from helpers.hybrids import HYBRIDS, make_hybrid
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.folder import read_config
from checkpoint.loading import load_head, load_model, shares_of
from common.errors import InputError
from drafters.draft_model import DraftModel
from drafters.eagle import Eagle
from drafters.lookahead import Lookahead
from drafters.lookup import Lookup
from engine.engine import Engine
from engine.runtime import Runtime
from engine.target import load_target
from kernels.choose import choose_backend
from networks.hybrid import Hybrid
from quantize import main as quantize
from sampling.options import Sampling
from tree import TreeShape

OPTIONS = {"compile": False, "max_seq_len": 160}


def loaded(folder, dtype=None, kernels=True):
    """(Target, MTP head) of a converted folder."""
    target, _ = load_model(folder, dtype=dtype)
    head = load_head(folder / "mtp", target, "mtp")
    if kernels:
        assert choose_backend("cpu").prepare(target, head) and target.whole
    return target, head


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_and_texts_of_transformers(tmp_path, name):
    """Of a prompt over several blocks: the definition's logits, and the text on the kernels."""
    reference = make_hybrid(tmp_path / "in", name, mtp=True)
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    target, _ = load_model(folder)
    assert isinstance(target, Hybrid) and target.args.delta_layers == (1, 1, 1, 0) * 2
    tokens = torch.randint(0, V, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(target.causal(tokens)[0])
    assert (logits - expected).abs().max() < 5e-4 * expected.abs().max()

    target, head = loaded(folder)
    for prompt in tokens[0, :3].tolist(), tokens[1, :71].tolist():
        text = greedy(reference, prompt, 40)
        for drafter in None, Eagle(head, TreeShape(12, 3, 4)):
            found = ids(Engine(target, drafter, **OPTIONS), [prompt], Sampling(40))[0]
            assert found == text, (len(prompt), drafter)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hybrid")
    make_hybrid(made / "in", "Qwen3.5", mtp=True)
    convert(made / "in", made / "out", quiet=True)
    convert(write_head(made / "head", *make_head("eagle3")), target=made / "out", quiet=True)
    return made / "out"


DRAFTERS = {
    "mtp": lambda head, other: Eagle(head, TreeShape(12, 3, 4)),
    "mtp, wide": lambda head, other: Eagle(head, TreeShape(60, 7, 10)),
    "eagle3": lambda head, other: Eagle(other, TreeShape(8, 2, 3)),
    "lookup": lambda head, other: Lookup(),
    "lookahead": lambda head, other: Lookahead(V, 5, 4, 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafted_text_is_plain_text(folder, name, dtype):
    """Bit for bit, also in batches of requests that come, go, and begin alike."""
    target, head = loaded(folder, dtype)
    other = load_head(folder / "eagle3", target, "eagle3")
    target.backend.prepare(other)
    made = requests(12, seed=3)
    engine = Engine(target, DRAFTERS[name](head, other), batch=3, **OPTIONS | {"max_seq_len": 240})
    plain = alone((target, None), made, max_seq_len=240)
    check_texts(decode(engine, made, random.Random(1), leaving=0.01), plain, made)


@pytest.mark.kernels
def test_the_definition_agrees_with_the_kernels(folder):
    """Without kernels drafted text equals plain text, too, and both are the kernels' in float32."""
    prompt = torch.randint(0, V, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    sampling = Sampling(12)
    target, head = loaded(folder, kernels=False)
    on_kernels, _ = loaded(folder)
    texts = [ids(Engine(t, d, **OPTIONS), [prompt], sampling)
             for t, d in ((target, None), (target, Eagle(head, TreeShape(8, 2, 3))), (on_kernels, None))]
    assert texts[0] == texts[1] == texts[2]


def test_a_text_that_goes_on_is_not_read_again(folder):
    """A prompt that continues a free place's text begins there. One that leaves it before begins anew."""
    target, _ = loaded(folder)
    engine = Engine(target, Lookup(), **OPTIONS)
    prompt = torch.randint(0, V, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    first = engine.generate([prompt], Sampling(30))[0]
    longer = [*prompt, *first.ids, 5, 6, 7]
    for text, cached in ((longer, 70), (prompt[:30] + [9] * 20, 0)):
        request = engine.generate([text], Sampling(20))[0]
        assert cached <= request.cached <= len(text) and (cached or not request.cached)
        assert request.ids == ids(Engine(target, **OPTIONS), [text], Sampling(20))[0]


def test_mtp_layer(folder, tmp_path):
    """Against a plain reading of its tensors: embedding first, then the target's normed state."""
    make_hybrid(tmp_path / "in", "Qwen3.5", mtp=True)
    state = load_file(tmp_path / "in" / "model.safetensors")
    target, head = loaded(folder, kernels=False)

    def rms(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + state[name])

    def get(name):
        return state[f"mtp.layers.0.{name}.weight"]

    T, hd, turning = 9, 20, 8
    tokens, feature = torch.arange(T), torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    embedded = rms(state["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding.weight")
    x = torch.cat((embedded, rms(feature, "mtp.pre_fc_norm_hidden.weight")), -1) @ state["mtp.fc.weight"].T
    a = rms(x, "mtp.layers.0.input_layernorm.weight")
    q, gate = (a @ get("self_attn.q_proj").T).view(T, 4, 2 * hd).chunk(2, -1)
    k, v = ((a @ get(f"self_attn.{n}_proj").T).view(T, 2, hd) for n in "kv")
    angle = torch.arange(T)[:, None] * 5000.0 ** (-torch.arange(0, turning, 2) / turning)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def turned(x):
        one, two, rest = x.split((turning // 2, turning // 2, hd - turning), -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1)

    q = turned(rms(q, "mtp.layers.0.self_attn.q_norm.weight")).transpose(0, 1)
    k = turned(rms(k, "mtp.layers.0.self_attn.k_norm.weight")).transpose(0, 1).repeat_interleave(2, 0)
    v = v.transpose(0, 1).repeat_interleave(2, 0)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    x = x + (attended * gate.sigmoid()).reshape(T, -1) @ get("self_attn.o_proj").T
    m = rms(x, "mtp.layers.0.post_attention_layernorm.weight")
    x = x + (F.silu(m @ get("mlp.gate_proj").T) * (m @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T
    expected = rms(x, "mtp.norm.weight")
    at = torch.arange(T)[None]
    caches = head.caches(1, T, torch.float32, "cpu")
    with torch.no_grad():
        found = head(tokens[None], feature[None], at, at, torch.ones(1, T, T).bool().tril(), caches)
        torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(head.fuse(feature), rms(feature, "model.norm.weight"))
        torch.testing.assert_close(head.logits(expected), expected @ state["lm_head.weight"].T)
    assert read_config(folder / "mtp")["aux_layers"] == [LAYERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dspark", "p-eagle", "medusa", "hydra++"])
def test_text_with_other_heads(folder, name):
    target, _ = load_model(folder)
    drafter = make_drafter(name, target, None, None, lambda *models: None)
    choose_backend("cpu").prepare(target, drafter.network)
    made = requests(4, seed=5)
    engine = Engine(target, drafter, batch=2, **OPTIONS | {"max_seq_len": 240})
    check_texts(decode(engine, made, random.Random(1)), alone((target, None), made, max_seq_len=240), made)


@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["int8", "w8a8"])
def test_quantised_text(folder, tmp_path, mode):
    """Drafted text is plain text; the MTP layer is quantised with its target."""
    quantize(["--checkpoint", str(folder), "--out", str(tmp_path / mode), "--mode", mode])
    target, head = loaded(tmp_path / mode)
    made = requests(4, seed=5)
    engine = Engine(target, Eagle(head, TreeShape(12, 3, 4)), batch=2, **OPTIONS | {"max_seq_len": 240})
    check_texts(decode(engine, made, random.Random(1)), alone((target, None), made, max_seq_len=240), made)


def test_what_these_targets_do_not_do(folder):
    target, head = loaded(folder)
    for make, words in {
        lambda: Engine(target, Eagle(head, TreeShape(120, 7, 12)), **OPTIONS): "at most 96 nodes on 16",
        lambda: Engine(target, Lookahead(V, 20, 5, 5), **OPTIONS): "a tree of 100 nodes",
        lambda: Engine(target, chunks=(128,), **OPTIONS): "at most 96",
        lambda: DraftModel(target, TreeShape(4, 2, 1)): "cannot draft for another",
        lambda: shares_of(read_config(folder), 2): "cannot be dealt",
        lambda: load_target(folder, Runtime(kv="int8")): "--kv int8",
    }.items():
        with pytest.raises((ValueError, InputError), match=words):
            make()


def test_a_pass_that_goes_back_is_refused(folder):
    """A state cannot be taken back: it would be wrong, silently."""
    target, _ = loaded(folder)
    engine = Engine(target, **OPTIONS)
    engine.generate([[5] * 80], Sampling(4))
    assert int(engine.passes.caches.deltas[0].start[0]) == 64
    at = torch.arange(40, 42)[None]
    visible = torch.arange(42) <= at[..., None]
    with pytest.raises(RuntimeError, match="read in order"), torch.no_grad():
        target(at, at, at, visible, engine.passes.caches)
