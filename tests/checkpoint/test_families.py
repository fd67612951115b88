"""Every family of targets: tiny random ones in their published layout, converted, against transformers.

Logits agree to 1e-4 relative, and 64 greedy tokens are equal, with plain and with speculative decoding. One
of the prompts is longer than the windows of families that have one.
"""
import json
from pathlib import Path

import pytest
import torch
from helpers import edit
from helpers.families import GPT_OSS_YARN, TARGETS, WINDOW, WINDOWS, V, greedy, make_target
from helpers.heads import make_head, write_head
from helpers.hybrids import HYBRIDS, make_hybrid

from checkpoint.convert import convert
from checkpoint.families import model_fields
from checkpoint.folder import read_config
from checkpoint.loading import load_head, load_model
from common.errors import InputError
from drafters import Drafting
from drafters.eagle import Eagle, StaticEagle
from drafters.lookup import Lookup
from engine.engine import Engine
from engine.runtime import Runtime
from engine.target import load_target
from kernels.choose import choose_backend
from sampling.options import Sampling
from tree import EAGLE1_TREE, TreeShape


def decoders_of(tmp_path, folder, target, **of_head) -> dict[str, Engine]:
    """Engines of a converted target, by the way they draft. of_head: changes of the heads' configs."""
    options = {"compile": False, "max_seq_len": 120, "batch": 2}
    found = {"plain": Engine(target, **options), "lookup": Engine(target, Lookup(), **options)}
    width = target.args.hidden_size
    for kind in ("eagle", "eagle3"):
        state, config = make_head(kind, hidden=width, target=width, **of_head)
        head_folder = convert(write_head(tmp_path / kind, state, config), target=folder, quiet=True)
        head = load_head(head_folder, target, kind)
        if target.backend:
            target.backend.prepare(head)
        found[kind] = Engine(target, Eagle(head, TreeShape(12, 2, 4)), **options)
        if kind == "eagle":
            found["static tree"] = Engine(target, StaticEagle(head, EAGLE1_TREE), **options)
    return found


WINDOWED = [
    name for name in TARGETS if any(words in name for words in ("window", "Phi-3", "Gemma 3", "gpt-oss"))
]
MIXTURES = "Mixtral", "Qwen3-MoE"
ON_KERNELS = [pytest.param(name, True, marks=pytest.mark.kernels) for name in (*WINDOWED, *MIXTURES)]
IN_PYTORCH = [  # one of each kind of windows; the others differ in what the kernels' rows show, too
    pytest.param(name, False, marks=[pytest.mark.dear] * (
        name in WINDOWED and name not in ("Mistral with its window", "Gemma 3", "gpt-oss")
    )) for name in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize("name, kernels", [*IN_PYTORCH, *ON_KERNELS])
def test_target(tmp_path, name, kernels):
    """Drafted text of a seed is the plain one. On the kernels heads have windows, too."""
    reference = make_target(tmp_path / "in", name)
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    target, config = load_model(folder)
    assert any(config.get("windows", ())) == (name in WINDOWED)
    if kernels:
        assert choose_backend("cpu").prepare(target) and target.layers[0].window in (0, WINDOW)
    tokens = torch.randint(0, V, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        logits = target.logits(target.causal(tokens)[0])
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    assert error < 1e-4, f"the largest error is {error:.1e} of the largest logit"
    g = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, V, (n,), generator=g).tolist() for n in (3, WINDOW + 7)]
    texts = [greedy(reference, prompt, 64) for prompt in prompts]
    decoders = decoders_of(tmp_path, folder, target, **{"sliding_window": 10} if kernels else {})
    for method, decoder in decoders.items():
        assert [o.ids for o in decoder.generate(prompts, Sampling(64))] == texts, method
    assert decoders["eagle3"].passes.drafter.head.layer.window == (10 if kernels else 0)
    plain, *drafted = ([o.ids for o in decoder.generate(prompts, Sampling(16, 1.0, seed=4))]
                       for decoder in decoders.values())
    assert drafted == [plain] * len(drafted)


@pytest.mark.kernels
def test_longrope_beyond_its_original_length(tmp_path):
    """Texts have the long factors from their first token on where there is room for more, which is asked for.
    """
    reference = make_target(tmp_path / "in", "Phi-3 with longrope")
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    loaded = load_target(folder, Runtime(device="cpu", compile=False))
    target, original = loaded.model, 256
    assert loaded.room(Drafting(), 1) == original and target.args.max_seq_len == 512
    tokens = torch.randint(0, V, (1, original + 44), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(target.causal(tokens)[0])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    prompts = [tokens[0, :n].tolist() for n in (original - 50, original + 1)]
    for room, prompt in zip((original, 2 * original), prompts):
        text = greedy(reference, prompt, 30)
        for drafter in None, Lookup():
            engine = Engine(target, drafter, compile=False, max_seq_len=room)
            assert engine.generate([prompt], Sampling(30))[0].ids == text, (room, drafter)


def test_heads_with_yarn(tmp_path):
    """Those of gpt-oss have its rope."""
    make_target(tmp_path / "in", "gpt-oss")
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    target, _ = load_model(folder)
    state, config = make_head("eagle3", hidden=64, target=64)
    config |= {"rope_scaling": GPT_OSS_YARN, "rope_theta": None}
    head = load_head(convert(write_head(tmp_path / "head", state, config), target=folder, quiet=True), target)
    assert head.args.rope_scaling["truncate"] is False and head.args.rope_factor > 1.2


# As published, as far as they say something about text.


SEEN = {  # config keys -> the windows of 8 layers
    "Qwen2's switch is off": ("Qwen2", {"sliding_window": 64}, None),
    "Qwen2's last layers": ("Qwen2", {**WINDOWS, "max_window_layers": 6}, [0] * 6 + [WINDOW] * 2),
    "Mistral's default": ("Mistral", {}, [4096] * 8),
    "LLaMA has none": ("Llama-3", {"sliding_window": 64}, None),
    "Gemma's pattern": ("Gemma 3", {"sliding_window": WINDOW}, [0 if i == 5 else WINDOW for i in range(8)]),
}


@pytest.mark.parametrize("case", SEEN)
def test_which_layers_have_a_window(tmp_path, case):
    name, changes, windows = SEEN[case]
    make_target(tmp_path / "in", name)
    edit(tmp_path / "in", "sliding_window", "use_sliding_window", "layer_types", "max_window_layers",
         "sliding_window_pattern", **{"max_position_embeddings": 8192} | changes)
    assert read_config(convert(tmp_path / "in", tmp_path / "out", quiet=True)).get("windows") == windows


REFUSED_TARGETS = {
    "dynamic RoPE": (
        "Llama-3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type is 'dynamic'"),
    "scores with a soft cap": ("Gemma 3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "another limit of the activation": ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not"),
    "experts quantised otherwise": ("gpt-oss", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    "another kind of layer": (
        "Qwen3.5", {"layer_types": ["full_attention"] * 7 + ["chunked"]}, "each of 8 layers"),
    "heads that do not fit": (
        "Qwen3.5", {"linear_num_key_heads": 4}, "6 heads of values are no multiple of 4"),
    "more layers than can be": ("Llama-3", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
}


@pytest.mark.parametrize("name", REFUSED_TARGETS)
def test_refused_targets(tmp_path, name):
    which, changes, words = REFUSED_TARGETS[name]
    (make_hybrid if which in HYBRIDS else make_target)(tmp_path / "in", which)
    file = tmp_path / "in" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError, match=words):
        convert(tmp_path / "in", tmp_path / "out", quiet=True)


@pytest.mark.parametrize("length, rope, longest", [
    (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
    (16384, {"rope_type": "linear", "factor": 4.0}, 16384),  # stretched already
    (16384, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 16384}, 65536),
    (16384, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
    (32768, {"rope_type": "yarn", "factor": 4.0}, 131072),
])
def test_the_context_grows_with_the_scaling_unless_it_has_grown(length, rope, longest):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 64)
    config = sizes | {"num_attention_heads": 4, "max_position_embeddings": length, "rope_scaling": rope}
    assert model_fields(Path("x"), config)["max_seq_len"] == longest
