"""Every family of targets: tiny random ones in their published layout, converted, against transformers.

Logits agree to 1e-4 relative, and 32 greedy tokens are equal, with plain and with speculative decoding. One
of the prompts is longer than the windows of families that have one.
"""
from pathlib import Path

import pytest
import torch
from helpers.families import LLAMA3, TARGETS, VARIANTS, WINDOW, WINDOWS, V, make_target, top_tokens
from helpers.heads import make_head, write_head

from checkpoint.convert import convert, family_of
from checkpoint.load import load_head, load_model
from checkpoint.source import Source
from drafters.ngram import NGram
from engine.draft import HeadDrafter
from engine.drafting import Drafting
from engine.engine import Engine
from engine.runtime import Runtime
from engine.sampling import Sampling
from engine.target import load_target
from kernels.choose import choose_backend
from tree import TreeShape


def engines_of(tmp_path, folder, target, **of_head) -> dict[str, Engine]:
    """Engines of a converted target by drafter. of_head: changes of the heads' configs."""
    options = {"compile": False, "max_seq_len": 120, "batch": 3}
    engines = {"plain": Engine(target, **options), "lookup": Engine(target, NGram(), **options)}
    width = target.args.hidden_size
    for kind in ("eagle", "eagle3"):
        state, config = make_head(kind, hidden=width, target=width, **of_head)
        head_folder = convert(write_head(tmp_path / kind, state, config), target=folder, quiet=True)
        head = load_head(head_folder, target, kind)
        if target.backend:
            target.backend.prepare(head)
        engines[kind] = Engine(target, HeadDrafter(head, TreeShape(12, 2, 4)), **options)
    return engines


WINDOWED = [
    name for name in TARGETS
    if any(words in name for words in ("window", "Phi-3", "Gemma", "gpt-oss", "OLMo 3"))
]
MIXTURES = "Mixtral", "Qwen3-MoE"
ON_KERNELS = {*WINDOWED, *MIXTURES, *VARIANTS}
IN_PYTORCH = [  # one of each kind of windows; the others differ in what the kernels' rows show, too
    pytest.param(name, False, marks=[pytest.mark.expensive] * (
        name in ON_KERNELS and name not in ("Mistral with its window", "Gemma 3", "gpt-oss", *MIXTURES)
    )) for name in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize("name, kernels", [
    *IN_PYTORCH,
    *(pytest.param(name, True, marks=pytest.mark.kernels) for name in TARGETS if name in ON_KERNELS)])
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
    short, long = (torch.randint(0, V, (n,), generator=g).tolist() for n in (3, WINDOW + 7))
    engines = engines_of(tmp_path, folder, target, **{"sliding_window": 10} if kernels else {})
    assert engines["eagle3"].runner.drafter.head.layer.window == (10 if kernels else 0)
    samplings = [Sampling(32), Sampling(32), Sampling(16, 1.0, seed=4)]
    plain, *drafted = ([o.ids for o in engine.generate([short, long, short], samplings)]
                       for engine in engines.values())
    assert [top_tokens(reference, short, plain[0]), top_tokens(reference, long, plain[1])] == plain[:2]
    for method, texts in zip([*engines][1:], drafted):
        assert texts == plain, method


@pytest.mark.kernels
def test_longrope_beyond_its_original_length(tmp_path):
    """Texts have the long factors from their first token on where there is room for more, which is asked for.
    """
    reference = make_target(tmp_path / "in", "Phi-3 with longrope")
    folder = convert(tmp_path / "in", tmp_path / "out", quiet=True)
    loaded = load_target(folder, Runtime(device="cpu", compile=False))
    target, original = loaded.model, 256
    assert loaded.default_max_seq_len(Drafting(), 1) == original and target.args.max_seq_len == 512
    tokens = torch.randint(0, V, (original + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    for room, prompt in (original, tokens[:-50]), (2 * original, tokens):
        for drafter in None, NGram():
            engine = Engine(target, drafter, compile=False, max_seq_len=room)
            text = engine.generate([prompt], Sampling(30))[0].ids
            assert top_tokens(reference, prompt, text) == text, (room, drafter)


LINEAR, YARN = ({"rope_scaling": {"rope_type": kind, "factor": 4.0}} for kind in ("linear", "yarn"))
MEANT = [  # configs as published, which leave much unsaid: the windows of 8 layers, the longest text
    ("Qwen2", {"sliding_window": 64}, None, 2048),  # its switch is off
    ("Qwen2", {**WINDOWS, "max_window_layers": 6}, [0] * 6 + [WINDOW] * 2, 2048),
    ("Mistral", {"max_position_embeddings": 8192}, [4096] * 8, 8192),
    ("Llama", {"sliding_window": 64}, None, 2048),
    ("Gemma3", {"sliding_window": WINDOW}, [0 if i == 5 else WINDOW for i in range(8)], 131072),
    ("Llama", {"max_position_embeddings": 4096, **LINEAR}, None, 16384),
    ("Llama", {"max_position_embeddings": 16384, **LINEAR}, None, 16384),  # stretched already
    ("Llama", {"max_position_embeddings": 16384, "original_max_position_embeddings": 8192, **LINEAR},
     None, 32768),
    ("Qwen2", {"max_position_embeddings": 32768, **YARN}, None, 131072),
    ("GraniteMoeHybrid", {"layer_types": ["attention"] * 8, "num_local_experts": 0}, None, 2048),
    ("Glm4MoeLite", {"q_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16,
                     "first_k_dense_replace": 1}, None, 2048),
    ("Ministral3", {"max_position_embeddings": 4096, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
        "llama_4_scaling_beta": 0.1}}, None, 1024),
]


@pytest.mark.parametrize("family, keys, windows, longest", MEANT)
def test_what_a_config_means(family, keys, windows, longest):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    config = sizes | {"num_hidden_layers": 8, "num_attention_heads": 4} | keys
    source = Source(Path("x"), f"{family}ForCausalLM", config, {}, [], None, bool)
    fields = family_of(source).fields(source)
    assert (fields.get("windows"), fields["max_seq_len"]) == (windows, longest)


DEFAULT, KINDS = {"rope_type": "default", "rope_theta": 5e5}, ("full_attention", "sliding_attention")


@pytest.mark.parametrize("family, keys, base, scaling", [
    ("Qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 5e5, "yarn"),
    ("Qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 2e4}}, 2e4, "linear"),
    ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e4,
               "rope_parameters": {"rope_type": "default"}}, 3e4, "linear"),
    ("Llama", {"rope_scaling": LLAMA3 | {"rope_theta": None}}, 5e5, "llama3"),
    ("Llama", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3 | DEFAULT}, 5e5, None),
    ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": dict.fromkeys(KINDS, DEFAULT)}, 5e5, "linear"),
])
def test_rope_scaling_counts_beside_rope_parameters(family, keys, base, scaling):
    """As in transformers 5. The base stays, which is lost there."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    config = sizes | {"num_hidden_layers": 8, "num_attention_heads": 4, "rope_parameters": DEFAULT} | keys
    source = Source(Path("x"), f"{family}ForCausalLM", config, {}, [], None, bool)
    fields = family_of(source).fields(source)
    assert (fields["rope_base"], (fields["rope_scaling"] or {}).get("rope_type")) == (base, scaling)


@pytest.mark.parametrize("name, warned", [("Qwen2", True), ("Qwen3", False)])
def test_qwen2_overflows_in_fp16(tmp_path, name, warned):
    make_target(tmp_path / "in", name)
    folder, said = convert(tmp_path / "in", tmp_path / "out", quiet=True), []
    load_target(folder, Runtime("cpu", "fp16", kernels=False), said.append)
    assert any("Qwen2's activations overflow" in line for line in said) is warned
