"""Targets with gated delta nets: against transformers, drafted and plain, their MTP layers, refusals."""
import random

import pytest
import torch
from helpers.decoding import alone, check_texts, decode, ids, requests
from helpers.families import H, V, top_tokens
from helpers.hybrids import HYBRIDS, make_hybrid
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.load import load_head, load_model, read_config
from checkpoint.quantizing import QuantizationPlan, quantize_folder
from checkpoint.sharded import shards_of
from common.errors import InputError
from drafters.draft_model import DraftModel
from drafters.lookahead import Lookahead
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.runtime import Runtime
from engine.sampling import Sampling
from engine.target import load_target
from families.hybrid import RING, Hybrid
from kernels.choose import choose_backend
from kernels.packed import CpuCaches, Int8Caches
from kernels.quantized import LM_HEAD_MODES, Scheme
from quantize import main as quantize
from tree import TreeShape

OPTIONS = {"compile": False, "max_seq_len": 160}


def loaded(folder, dtype=None, kernels=True):
    """(Target, MTP head) of a converted folder."""
    target, _ = load_model(folder, dtype=dtype)
    head = load_head(folder / "mtp", target, "mtp")
    if kernels:
        assert choose_backend("cpu").prepare(target, head) and target.runs_on_backend
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
        for drafter in None, HeadDrafter(head, TreeShape(12, 3, 4)):
            text = ids(Engine(target, drafter, **OPTIONS), [prompt], Sampling(40))[0]
            assert top_tokens(reference, prompt, text) == text, (len(prompt), drafter)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hybrid")
    make_hybrid(made / "in", "Qwen3.5", mtp=True, layers=4)
    return convert(made / "in", made / "out", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("shape, dtype", [
    (TreeShape(12, 3, 4), torch.bfloat16), (TreeShape(60, 7, 10), torch.float32),
], ids=str)
def test_drafted_text_is_plain_text(folder, shape, dtype):
    """Bit for bit, also in batches of requests that come, go, and begin alike. Other drafters:
    tests/drafters/test_text.py.
    """
    target, head = loaded(folder, dtype)
    made = requests(12, seed=3)
    engine = Engine(target, HeadDrafter(head, shape), batch=3, **OPTIONS | {"max_seq_len": 240})
    plain = alone((target, None), made, max_seq_len=240)
    check_texts(decode(engine, made, random.Random(1), leaving=0.01), plain, made)


PROMPT = torch.randint(0, V, (141,), generator=torch.Generator().manual_seed(2)).tolist()
KEPT = 112 + 16  # of the chunk from 128 on, after 64 and 64
GOING_ON = {  # the tokens taken of the first prompt and its answer, what follows them, what is not read again
    "the next turn": (181, [5, 6, 7], range(170, 182)),
    "without the answer": (141, [9, 8] + [7] * 80, [KEPT]),
    "the same prompt": (141, [], [KEPT]),
    "less than is kept": (KEPT, [9] * 20, [0]),
}


@pytest.mark.parametrize("case", GOING_ON)
def test_a_text_that_goes_on_is_not_read_again(folder, case):
    """A prompt that continues a free place's text begins there. One that leaves it after its prompt begins at
    the state kept there, one that leaves it before begins anew: three times, as the state moves.
    """
    taken, more, cached = GOING_ON[case]
    target, head = loaded(folder)
    options = OPTIONS | {"max_seq_len": 450}
    engine = Engine(target, HeadDrafter(head, TreeShape(12, 3, 4)), batch=2, **options)
    # After a long answer the ring holds nothing of the prompt.
    first = engine.generate([PROMPT], Sampling(RING if case == "the same prompt" else 40))[0]
    text = [*PROMPT, *first.ids][:taken] + more
    request = engine.generate([text], Sampling(20))[0]
    assert request.cached in cached
    again = engine.generate([[*PROMPT, 1], [*text, 2]], Sampling(20))
    for found in (request, *again):
        assert found.ids == ids(Engine(target, **options), [found.prompt], Sampling(20))[0]


def test_mtp_layer(folder, tmp_path):
    """Against a layer of transformers with its weights: embedding first, then the target's normed state."""
    reference = make_hybrid(tmp_path / "in", "Qwen3.5", mtp=True, layers=4).model
    state = load_file(tmp_path / "in" / "model.safetensors")
    target, head = loaded(folder, kernels=False)
    layer, prefix = reference.layers[3], "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def rms(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + state[name])

    T = 9
    tokens, feature = torch.arange(T), torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    at, visible = torch.arange(T)[None], torch.ones(1, T, T).bool().tril()
    embedded = rms(state["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding.weight")
    x = torch.cat((embedded, rms(feature, "mtp.pre_fc_norm_hidden.weight")), -1) @ state["mtp.fc.weight"].T
    with torch.no_grad():
        x = layer(x[None], reference.rotary_emb(x[None], at), visible[:, None])
        expected = rms(x[0], "mtp.norm.weight")
        found = head(tokens[None], feature[None], at, at, visible, head.caches(1, T, torch.float32, "cpu"))
        torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(head.fuse(feature), rms(feature, "model.norm.weight"))
        torch.testing.assert_close(head.logits(expected), expected @ state["lm_head.weight"].T)
    assert read_config(folder / "mtp")["aux_layers"] == [4]


def off_by(folder, exact, layer: int) -> float:
    """The relative error of the states entering a layer of a folder's target."""
    tokens = torch.randint(0, V, (2, 90), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found, expected = (t.causal(tokens, (layer,))[1] for t in (load_model(folder)[0], exact))
    return float((found - expected).norm() / expected.norm())


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name, mode, most", [
    ("Qwen3.5", "int8", 0.04), ("Qwen3-Next", "w8a8", 0.12),
    ("Qwen3.5", "int4", 0.5), ("Qwen3-Next", "w4a8", 0.6),
])
def test_quantized_text(tmp_path, name, mode, most):
    """Drafted text is plain text, with caches in int8 too; the MTP layer is quantized with its target."""
    make_hybrid(tmp_path / "in", name, mtp=True, wide=True, layers=4)
    source, out = convert(tmp_path / "in", tmp_path / "exact", quiet=True), tmp_path / mode
    command = ["--group", "32", "--method", "nearest"] if mode in LM_HEAD_MODES else []
    assert quantize(["--checkpoint", str(source), "--mode", mode, "--out", str(out), *command]) == 0
    exact, made = load_model(source)[0], requests(4, seed=5)
    assert 0 < off_by(out, exact, 1) < most
    if mode == "int4":  # by GPTQ, too
        ids = torch.randint(0, V, (4, 128), generator=torch.Generator().manual_seed(3))
        quantize_folder(QuantizationPlan.of(source, Scheme("int4", 32, "int8")), tmp_path / "gptq", ids)
        for layer in 1, 4:
            assert off_by(tmp_path / "gptq", exact, layer) < off_by(out, exact, layer)
    for kv, caches in (("auto", CpuCaches), ("int8", Int8Caches)):
        target = load_target(out, Runtime(device="cpu", kv=kv)).model
        head = load_head(out / "mtp", target, "mtp")
        target.backend.prepare(head)
        drafter = HeadDrafter(head, TreeShape(12, 3, 4))
        engine = Engine(target, drafter, batch=2, **OPTIONS | {"max_seq_len": 240})
        assert type(engine.runner.caches.groups[0]) is caches
        plain = alone((target, None), made, max_seq_len=240)
        check_texts(decode(engine, made, random.Random(1)), plain, made)


def test_what_these_targets_do_not_do(folder):
    """A pass that goes back, for one: a state cannot be taken back, and would be wrong, silently."""
    target, head = loaded(folder)
    engine = Engine(target, **OPTIONS)
    engine.generate([[5] * 80], Sampling(4))
    back = torch.arange(40, 42)[None]  # the state is at 64
    for make, words in {
        lambda: Engine(target, HeadDrafter(head, TreeShape(120, 7, 12)), **OPTIONS): "at most 96 nodes on 16",
        lambda: Engine(target, Lookahead(V, 20, 5, 5), **OPTIONS): "a tree of 100 nodes",
        lambda: DraftModel(target, TreeShape(4, 2, 1)): "cannot draft for another",
        lambda: shards_of(read_config(folder), 3): "3 ranks",
        lambda: target(back, back, back, torch.arange(42) <= back[..., None], engine.runner.caches):
            "read in order",
    }.items():
        with pytest.raises((ValueError, InputError, RuntimeError), match=words), torch.no_grad():
            make()
