"""Every model family against transformers: tiny random models in the published layout, converted.

Logits agree to 1e-4 relative, and 32 greedy tokens are equal, with plain and with speculative decoding. One
of the prompts is longer than the sliding window of families that have one.
"""
import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from helpers.decoding import alone, check_outputs, decode, ids, requests
from helpers.families import (
    GLM_MTP,
    HYBRIDS,
    TARGETS,
    VARIANTS,
    WIDE,
    WINDOW,
    H,
    V,
    converted,
    top_tokens,
)
from helpers.heads import add_heads
from helpers.published import PUBLISHED, make_published
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint.convert import convert, family_of
from checkpoint.families import FAMILIES
from checkpoint.load import load_head, load_model, read_config
from checkpoint.sharded import shards_of
from checkpoint.source import Source
from common.errors import InputError
from drafters.draft_model import DraftModel
from drafters.lookahead import Lookahead
from drafters.ngram import NGram
from engine.draft import HeadDrafter
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.sampling import Sampling
from engine.target import Runtime, load_target
from families.hybrid import RING
from families.mixed import causal
from kernels.choose import choose_backend
from kernels.cpu_cache import CpuCaches
from kernels.kv_dtypes import Int8Caches
from kernels.scheme import LM_HEAD_MODES
from quantize import main as quantize
from tree import TreeShape


def engines_of(tmp_path, folder, target, **of_head) -> dict[str, Engine]:
    """Return engines of a converted target by drafter. of_head: changes to the heads' configs."""
    options = {"compile": False, "max_seq_len": 120, "batch": 3}
    engines = {"plain": Engine(target, **options), "lookup": Engine(target, NGram(), **options)}
    add_heads(tmp_path, folder, target.args.hidden_size, **of_head)
    for kind in ("eagle", "eagle3", "mtp"):
        if (folder / kind).is_dir():
            head = load_head(folder / kind, target, kind)
            if target.backend:
                target.backend.prepare(head)
            engines[kind] = Engine(target, HeadDrafter(head, TreeShape(12, 3, 4)), **options)
    return engines


WINDOWED = [
    name for name in TARGETS
    if any(words in name for words in ("window", "Phi-3", "Gemma", "gpt-oss", "OLMo 3"))
]
MIXTURES = "Mixtral", "Qwen3-MoE"
ON_KERNELS = {*WINDOWED, *MIXTURES, *VARIANTS}
IN_PYTORCH = [  # one family for each kind of window: the cases on the kernels cover the others, too
    pytest.param(name, False, marks=[pytest.mark.expensive] * (
        name in ON_KERNELS and name not in ("Mistral with its window", "Gemma 3", "gpt-oss", *MIXTURES)
    )) for name in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize("name, kernels", [
    *IN_PYTORCH,
    *(pytest.param(name, True, marks=pytest.mark.kernels) for name in TARGETS if name in ON_KERNELS),
    *(pytest.param(name, True, marks=pytest.mark.kernels) for name in HYBRIDS)])
def test_target(tmp_path, name, kernels):
    """Speculative output equals plain output, also when sampled. On the CPU kernels the heads have sliding
    windows too; for hybrid models, logits are compared in PyTorch and output is compared on the kernels.
    """
    reference, folder = converted(tmp_path, name, mtp=name in HYBRIDS)
    target, config = load_model(folder)
    assert any(config.get("windows", ())) == (name in WINDOWED)
    if kernels and name not in HYBRIDS:
        assert choose_backend("cpu").prepare(target) and target.layers[0].window in (0, WINDOW)
    tokens = torch.randint(0, V, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        logits = target.logits(causal(target, tokens)[0])
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    limit = 5e-4 if name in HYBRIDS else 1e-4
    assert error < limit, f"the largest error is {error:.1e} of the largest logit"
    if name in HYBRIDS:
        assert target.args.delta_layers == (1, 1, 1, 0) * 2
        assert choose_backend("cpu").prepare(target) and target.runs_on_backend
    g, longest = torch.Generator().manual_seed(5), 71 if name in HYBRIDS else WINDOW + 7
    short, long = (torch.randint(0, V, (n,), generator=g).tolist() for n in (3, longest))
    engines = engines_of(tmp_path, folder, target, **{"sliding_window": 10} if kernels else {})
    assert engines["eagle3"].runner.drafter.head.layer.window == (10 if kernels else 0)
    scored = {"logprobs": 0} if kernels and "LFM2" in name else {}  # equal bit for bit
    samplings = [Sampling(32, **scored), Sampling(32), Sampling(16, 1.0, seed=4, **scored)]
    plain, *drafted = ([(o.ids, o.scores) for o in engine.generate([short, long, short], samplings)]
                       for engine in engines.values())
    for prompt, (text, _) in zip((short, long), plain):
        assert top_tokens(reference, prompt, text) == text
    for method, texts in zip([*engines][1:], drafted):
        assert texts == plain, method


@pytest.mark.kernels
def test_longrope_beyond_its_original_length(tmp_path):
    """With a larger max_seq_len, which has to be requested, the long factors apply from the first token on.
    """
    reference, folder = converted(tmp_path, "Phi-3 with longrope")
    loaded = load_target(folder, Runtime(device="cpu", compile=False))
    target, original = loaded.model, 256
    assert loaded.default_max_seq_len(DraftOptions(), 1) == original and target.args.max_seq_len == 512
    tokens = torch.randint(0, V, (original + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    for max_seq_len, prompt in (original, tokens[:-50]), (2 * original, tokens):
        for drafter in None, NGram():
            engine = Engine(target, drafter, compile=False, max_seq_len=max_seq_len)
            text = engine.generate([prompt], Sampling(30))[0].ids
            assert top_tokens(reference, prompt, text) == text, (max_seq_len, drafter)


WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
LLAMA3 = TARGETS["Llama-3.1"][1]["rope_parameters"]
LINEAR, YARN = ({"rope_scaling": {"rope_type": kind, "factor": 4.0}} for kind in ("linear", "yarn"))
FIELDS = [  # family, published keys, expected windows of 8 layers, expected max_seq_len
    ("Qwen2", {"sliding_window": 64}, None, 2048),  # use_sliding_window defaults to false
    ("Qwen2", {**WINDOWS, "max_window_layers": 6}, [0] * 6 + [WINDOW] * 2, 2048),
    ("Mistral", {"max_position_embeddings": 8192}, [4096] * 8, 8192),
    ("Llama", {"sliding_window": 64}, None, 2048),
    ("Gemma3", {"sliding_window": WINDOW}, [0 if i == 5 else WINDOW for i in range(8)], 131072),
    ("Llama", {"max_position_embeddings": 4096, **LINEAR}, None, 16384),
    ("Llama", {"max_position_embeddings": 16384, **LINEAR}, None, 16384),  # scaled already
    ("Llama", {"max_position_embeddings": 16384, "original_max_position_embeddings": 8192, **LINEAR},
     None, 32768),
    ("Qwen2", {"max_position_embeddings": 32768, **YARN}, None, 131072),
    ("Ministral3", {"max_position_embeddings": 4096, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
        "llama_4_scaling_beta": 0.1}}, None, 1024),
]


def fields_of(family: str, keys: dict) -> dict:
    """Return our config of a published one."""
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    config = sizes | {"num_hidden_layers": 8, "num_attention_heads": 4} | keys
    return read_fields(f"{family}ForCausalLM", config)


def read_fields(architecture: str, config: dict) -> dict:
    source = Source(Path("x"), architecture, config, {}, [], None, bool)
    return family_of(source.path, architecture).fields(source)


@pytest.mark.parametrize("family, keys, windows, max_seq_len", FIELDS)
def test_config_fields(family, keys, windows, max_seq_len):
    fields = fields_of(family, keys)
    assert (fields.get("windows"), fields["max_seq_len"]) == (windows, max_seq_len)


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
def test_rope_scaling_with_rope_parameters(family, keys, base, scaling):
    """`rope_scaling` has precedence, as in transformers 5, but keeps rope_theta, which transformers drops."""
    fields = fields_of(family, {"rope_parameters": DEFAULT} | keys)
    assert (fields["rope_base"], (fields["rope_scaling"] or {}).get("rope_type")) == (base, scaling)


@pytest.mark.parametrize("name, warned", [("Qwen2", True), ("Qwen3", False)])
def test_qwen2_in_fp16_logs_a_warning(tmp_path, name, warned):
    (_, folder), logged = converted(tmp_path, name), []
    load_target(folder, Runtime("cpu", "fp16", kernels=False), logged.append)
    assert any("Qwen2's activations overflow" in line for line in logged) is warned


# -- Gated DeltaNet: prefix reuse, MTP layers, unsupported features ------------------------------------------


OPTIONS = {"compile": False, "max_seq_len": 160}


def loaded(folder, kernels=True):
    """Return (target, MTP head) of a converted folder."""
    target, _ = load_model(folder)
    head = load_head(folder / "mtp", target, "mtp")
    if kernels:
        assert choose_backend("cpu").prepare(target, head) and target.runs_on_backend
    return target, head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("hybrid"), "Qwen3.5", mtp=True, num_hidden_layers=4)[1]


PROMPT = torch.randint(0, V, (141,), generator=torch.Generator().manual_seed(2)).tolist()
SAVED = 112 + 16  # the last chunk starts at 128: its state is at 112, and 16 tokens after it are saved
PREFIXES = {  # tokens taken from the first prompt and its answer, tokens appended, cached tokens
    "the next turn": (181, [5, 6, 7], range(170, 182)),
    "without the answer": (141, [9, 8] + [7] * 80, [SAVED]),
    "the same prompt": (141, [], [SAVED]),
    "less than the saved prefix": (SAVED, [9] * 20, [0]),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_reuse(folder, case):
    """A prompt that extends the text of a free slot is computed from there. One that diverges after the
    slot's prompt resumes from the state saved at its end, one that diverges earlier starts from token 0.
    Two more requests check the states that the second one leaves.
    """
    taken, more, cached = PREFIXES[case]
    target, head = loaded(folder)
    options = OPTIONS | {"max_seq_len": 450}
    engine = Engine(target, HeadDrafter(head, TreeShape(12, 3, 4)), batch=2, **options)
    # After a long answer the ring buffers hold no token of the prompt.
    first = engine.generate([PROMPT], Sampling(RING if case == "the same prompt" else 40))[0]
    text = [*PROMPT, *first.ids][:taken] + more
    request = engine.generate([text], Sampling(20))[0]
    assert request.cached in cached
    again = engine.generate([[*PROMPT, 1], [*text, 2]], Sampling(20))
    for found in (request, *again):
        assert found.ids == ids(Engine(target, **options), [found.prompt], Sampling(20))[0]


@pytest.mark.parametrize("name", ("Qwen3.5", "GLM-4.7-Flash"))
def test_mtp_layer(tmp_path, name):
    """Against a transformers layer with the same weights: the embedding comes first, then the target's normed
    state.
    """
    is_glm, source = name != "Qwen3.5", tmp_path / "in"
    reference, folder = converted(tmp_path, name, mtp=not is_glm, num_hidden_layers=4)
    reference, state = reference.model, load_file(source / "model.safetensors")
    target, head = loaded(folder, kernels=False)
    if is_glm:  # the file's fifth layer is the MTP layer
        reference = AutoModelForCausalLM.from_pretrained(
            source, num_hidden_layers=5, mlp_layer_types=["dense"] + 4 * ["sparse"]).model.eval()
        state |= {f"mtp.{ours}.weight": state[f"model.layers.4.{theirs}"]
                  for ours, theirs in GLM_MTP.items()}
        layer = reference.layers[4]
    else:
        layer, prefix = reference.layers[3], "mtp.layers.0."
        layer.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def rms(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (int(not is_glm) + state[name])

    T = 9
    tokens, feature = torch.arange(T), torch.randn(T, H, generator=torch.Generator().manual_seed(1))
    at, visible = torch.arange(T)[None], torch.ones(1, T, T).bool().tril()
    embedded = rms(state["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding.weight")
    x = torch.cat((embedded, rms(feature, "mtp.pre_fc_norm_hidden.weight")), -1) @ state["mtp.fc.weight"].T
    with torch.no_grad():
        mask, angles = visible[:, None], reference.rotary_emb(x[None], at)
        x = layer(x[None], attention_mask=mask, position_embeddings=angles)
        expected = rms(x[0], "mtp.norm.weight")
        found = head(tokens[None], feature[None], at, at, visible, head.caches(1, T, torch.float32, "cpu"))
        torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(head.fuse(feature), rms(feature, "model.norm.weight"))
        torch.testing.assert_close(head.logits(expected), expected @ state["lm_head.weight"].T)
    assert read_config(folder / "mtp")["aux_layers"] == [4]


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name, mode, max_error", [
    ("Qwen3.5", "int8", 0.04), ("Qwen3-Next", "w8a8", 0.12),
    ("Qwen3.5", "int4", 0.5), ("Qwen3-Next", "w4a8", 0.6),
])
def test_quantized_hybrids(tmp_path, name, mode, max_error):
    """Speculative output equals plain output, also with an int8 cache; the MTP layer is quantized with its
    target.
    """
    dtype, out = "bf16" if name == "Qwen3-Next" else "keep", tmp_path / mode
    _, source = converted(tmp_path, name, dtype, mtp=True, num_hidden_layers=4, **WIDE[name])
    command = ["--group", "32", "--method", "nearest"] if mode in LM_HEAD_MODES else []
    assert quantize(["--checkpoint", str(source), "--mode", mode, "--out", str(out), *command]) == 0
    tokens = torch.randint(0, V, (2, 90), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        quantized, original = (causal(load_model(path)[0], tokens, (1,))[1] for path in (out, source))
    assert 0 < (quantized - original).norm() / original.norm() < max_error
    generated = requests(4, seed=5)
    for kv, caches in (("auto", CpuCaches), ("int8", Int8Caches)):
        target = load_target(out, Runtime(device="cpu", kv=kv)).model
        head = load_head(out / "mtp", target, "mtp")
        target.backend.prepare(head)
        drafter = HeadDrafter(head, TreeShape(12, 3, 4))
        engine = Engine(target, drafter, batch=2, **OPTIONS | {"max_seq_len": 240})
        assert type(engine.runner.caches.groups[0]) is caches
        plain = alone((target, None), generated, max_seq_len=240)
        check_outputs(decode(engine, generated, random.Random(1)), plain, generated)


def test_unsupported_features(folder):
    """For example, a pass over earlier positions: a recurrent state cannot be rolled back, and the result
    would be silently wrong.
    """
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


# -- configs as published ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config(tmp_path, name):
    """With fewer layers and random weights: the logits equal those of transformers."""
    reference = make_published(tmp_path / "in", name)
    target, _ = load_model(convert(tmp_path / "in", tmp_path / "out", quiet=True))
    tokens = torch.randint(0, V, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = reference(tokens).logits, target.logits(causal(target, tokens)[0])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


HARMLESS = {
    "architectures", "attention_dropout", "block_dim", "block_mlp_init_scale", "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init", "bos_token_id", "cache_implementation", "conv_dim", "conv_dim_out",
    "conv_use_xavier_init", "dtype", "embd_pdrop", "eos_token_id", "init_method", "initializer_range",
    "mamba_chunk_size", "max_window_layers", "model_type", "no_rope_layer_interval", "num_heads",
    "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "pretraining_tp", "resid_pdrop",
    "router_aux_loss_coef", "topk_group", "torch_dtype", "transformers_version", "use_cache",
}
OTHER = {bool: lambda v: not v, int: lambda v: 2 * v + 2, float: lambda v: 2 * v + 1, str: lambda v: "odd",
         list: lambda v: v[1:] or [1], dict: lambda v: {"rope_type": "odd"}}


def test_every_config_key_matters():
    """Changing any key of a published config changes our fields or raises an error, except for HARMLESS ones.
    """
    unused, used = set(), set()
    for published in PUBLISHED.values():
        whole = published.get("thinker_config", published)
        text, others = whole.get("text_config", whole), whole if "text_config" in whole else {}
        for key, value in text.items():
            changed = value if value is None else OTHER[type(value)](value)
            configs = [one | others for one in (text, text | {key: changed})]
            try:
                fields, changed_fields = (read_fields(published["architectures"][0], one) for one in configs)
                (unused if fields == changed_fields else used).add(key)
            except InputError:
                used.add(key)
    assert unused - used == HARMLESS


FOREIGN_KEYS = {  # written by other tools and versions: SmolLM2, gpt-oss, Qwen3.5, merged models
    "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
    "experts_per_token": 4, "initial_context_length": 4096, "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "unsloth_fixed": True, "max_length": 20, "top_k": 50, "top_p": 0.9,
    "_attn_implementation_autoset": True, "pretraining_tp": 2, "neftune_noise_alpha": 5,
}
ARCHITECTURES = [name for name in FAMILIES if "For" in name and hasattr(transformers, name)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unknown_keys_are_rejected(name):
    """All keys that transformers writes are accepted; any other key is rejected unless its value has no
    effect.
    """
    config = json.loads(getattr(transformers, name).config_class().to_json_string(use_diff=False))
    whole = config.get("thinker_config", config)
    text = whole.get("text_config") or whole
    if "GraniteMoeHybrid" in name:  # its defaults are not supported
        kinds = ["attention", "mamba"] * (text["num_hidden_layers"] // 2)
        text |= {"num_local_experts": 0, "layer_types": kinds}
    for other in {}, {"odd_scale": 1.0, "odd_switch": False}, FOREIGN_KEYS:
        assert read_fields(name, text | other)
    if name == "Qwen3MoeForCausalLM":  # as Qwen3-Coder-30B-A3B
        assert read_fields(name, text | {"use_qk_norm": True, "shared_expert_intermediate_size": 0})
    for key, value in (
        ("odd_scale", 0.5), ("odd_switch", True), ("odd_layers", [3]), ("output_multiplier", 0.5),
        ("is_causal", False),
    ):
        with pytest.raises(InputError, match=f"{key} .*is not supported"):
            read_fields(name, text | {key: value})
