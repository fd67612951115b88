"""Speculative output equals plain decoding: every drafter and sampling option, in PyTorch and on the CPU
kernels.
"""
import json
import random
from itertools import pairwise

import pytest
import torch
from helpers.decoding import OPTIONS, alone, check_outputs, decode, ids, load, prompts, requests
from helpers.drafters import NAMES, cases, make_drafter
from helpers.families import converted
from helpers.heads import add_heads, write_head
from helpers.published import HEADS, PUBLISHED, convert_published, published_head

from checkpoint.convert import convert
from checkpoint.load import load_head, load_model
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.request import Request
from engine.sampling import Sampling
from engine.target import Runtime, load_target
from kernels.choose import choose_backend
from kernels.kv_dtypes import Float8Caches, Int8Caches, from_bytes, to_bytes
from quantize import main as quantize
from tree import TreeShape

PROMPTS = [list(b"u:the tide comes in and the tide\na:"), [256, *range(97, 120)], [256, 1]]
SAMPLED = [Sampling(40, 1.0, seed=seed) for seed in range(3)]
SIZES = {"batch": 3, "max_seq_len": 200}
SPECULATIVE = [name for name in NAMES if name != "plain"]
SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["word", "count"],
    "properties": {"word": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
})
EVERYTHING = {
    "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    "logit_bias": {101: 2}, "top_p": 0.95, "top_k": 40, "logprobs": 3,
}


@pytest.fixture(scope="module")
def jobs_and_outputs(golden, models):
    """Return ((prompt, sampling) of requests with every option, plain outputs, engine options they need)."""
    sampling_options = (*OPTIONS, EVERYTHING, EVERYTHING | {"temperature": 0.8})
    guided = [{"json_schema": SCHEMA}, {"json_schema": SCHEMA, "temperature": 1.0, "min_p": 0.01}]
    jobs = requests(8, 1, sampling_options) + [
        (prompt, Sampling(40, seed=i, **guided[i])) for i, prompt in enumerate(prompts(2, seed=31))
    ]
    jobs += [(prompt, Sampling(30)) for prompt in PROMPTS[:2]]  # repetitive, so that lookup drafts
    target = load_target(golden, Runtime("cpu", compile=False))
    options = {"guide": target.guide, "stop_ids": target.config["stop_ids"]}
    return jobs, alone(models, jobs, **options), options


@pytest.mark.parametrize("name", cases(SPECULATIVE))
def test_in_pytorch(models, models1, jobs_and_outputs, name):
    """Requests that arrive at random in a batch of 3 get the output of plain decoding at batch size 1."""
    (jobs, expected, options), target = jobs_and_outputs, models[0]
    drafter = make_drafter(name, *models, models1[1], lambda model: None)
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False, **options)
    check_outputs(decode(engine, jobs, random.Random(2)), expected, jobs)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_stop_string_ends_text_and_tokens(golden, temperature):
    """At any position of the output, also in the middle of an accepted path."""
    llm, ends_in_step = load(golden, "eagle3", tree=TreeShape(12, 3, 3), compile=False), False
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "raw": True}
    whole = llm.generate("hello there", **settings)
    for i in range(1, len(whole.text) - 1):
        stop = whole.text[i : i + 2]
        request = llm.generate("hello there", stop=(stop, "never there"), logprobs=0, **settings)
        text, ids = whole.text[: whole.text.index(stop)], request.ids
        assert (request.text, request.finish, request.stop) == (text, "stop", stop)
        assert ids == whole.ids[: len(ids)] and llm.tokenizer.decode(ids) == text + stop
        assert len(request.scores) == len(ids) == 1 + sum(request.accept_lengths)
        ends_in_step |= request.accept_lengths != whole.accept_lengths[: len(request.accept_lengths)]
    assert ends_in_step


FULL_MODELS = "draft-model", "pard"  # drafters that are full models, not heads


@pytest.fixture(scope="module", params=("fp32", "bf16"))
def on_kernels(request, golden):
    """Return (make, plain outputs). make(name): an engine on the CPU kernels; bfloat16 heads are quantized to
    w8a8.
    """
    llm = load(golden, device="cpu", dtype=request.param, **SIZES)
    target, (raw, _) = llm.target, load_model(golden, "cpu", llm.target.runtime.torch_dtype)
    assert target.model.runs_on_backend and target.backend.step.batch_invariant

    def prepare(*models):
        target.prepare_models(*models, quantize=True)

    def make(name: str) -> Engine:
        heads = [load_head(golden / kind, target.model, kind) for kind in ("eagle3", "eagle")]
        prepare(*heads)
        model = target.model if name in FULL_MODELS else raw  # new heads copy unpacked tables
        return Engine(target.model, make_drafter(name, model, *heads, prepare), **SIZES)

    return make, [ids(llm.engine, PROMPTS, sampling) for sampling in (Sampling(40), SAMPLED)]


@pytest.mark.kernels
@pytest.mark.parametrize("name", SPECULATIVE)
def test_on_the_kernels(on_kernels, name):
    make, expected = on_kernels
    engine = make(name)
    for samplings, outputs in zip(([Sampling(40)] * 3, SAMPLED), expected):
        check_outputs(ids(engine, PROMPTS, samplings), outputs, list(zip(PROMPTS, samplings)))


# Recurrent state, MoE, attention sinks, sliding windows, short convolutions, shared KV.
FAMILIES = "Qwen3-Next", "Qwen3-MoE", "gpt-oss", "Gemma 3", "LFM2-MoE", "Gemma 4 E2B", "Gemma 4 26B-A4B"


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[pytest.mark.expensive] * (name != "Qwen3-Next")) for name in FAMILIES
])
def family(request, tmp_path_factory):
    """Return (target on the kernels, unpacked target, [EAGLE-3, EAGLE-1 head], jobs, plain outputs)."""
    work = tmp_path_factory.mktemp("family")
    _, folder = converted(work, request.param, "fp32")
    (raw, _), (target, _) = load_model(folder), load_model(folder)
    assert choose_backend("cpu").prepare(target)
    heads = [load_head(head, target) for head in add_heads(work, folder, target.args.hidden_size)]
    target.backend.prepare(*heads)
    jobs = requests(6, seed=5)  # greedy and sampled, longer than sliding windows and kernel blocks
    return target, raw, heads, jobs, alone((target, None), jobs)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.expensive] * (name not in {"p-eagle", "dspark", "hydra++"}))
    for name in SPECULATIVE
])
def test_families(family, name):
    """Like `test_in_pytorch`, on the CPU kernels and for model families of FAMILIES."""
    target, raw, heads, jobs, expected = family
    if target.is_recurrent and name in FULL_MODELS:
        return  # not supported, see tests/checkpoint/test_families.py
    model = target if name in FULL_MODELS else raw
    drafter = make_drafter(name, model, *heads, lambda *models: target.backend.prepare(*models))
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False)
    check_outputs(decode(engine, jobs, random.Random(1)), expected, jobs)


QUICK = {
    ("LiquidAI/LFM2-8B-A1B", "int4", "eagle3"), ("google/gemma-2-2b-it", "bf16", "eagle3"),
    ("gpt-oss", "bf16", "eagle3"), ("allenai/Olmo-3-7B-Instruct", "int8", "eagle3"),
    ("HuggingFaceTB/SmolLM3-3B", "int8", "eagle3"), ("Gemma 3", "bf16", "eagle3"),
    ("ibm-granite/granite-4.0-micro", "int4", "eagle3"), ("GLM-4.7-Flash", "int4", "mtp"),
    ("LiquidAI/LFM2.5-2.6B", "int8", "LiquidAI/LFM2.5-2.6B-DSpark"),
    ("google/gemma-4-12B-it", "bf16", "deepseek-ai/dspark_gemma4_12b_block7"),
    ("google/gemma-4-12B-it", "int4", "deepseek-ai/eagle3_gemma4_12b_ttt7"),
}
# Of families, but Gemma 4's assistants: see test_assistant.py.
OWN_HEADS = [("GLM-4.7-Flash", "mtp"), *((target, head) for head, (target, *_) in HEADS.items())]
GROUPED = {  # groups of 32 divide them
    "eagle3": {"head_dim": 16},
    "mtp": {"head_dim": 8, "v_head_dim": 32, "qk_nope_head_dim": 24, "q_lora_rank": 32},
}


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name, mode, kind", [
    pytest.param(name, mode, kind, marks=[pytest.mark.expensive] * ((name, mode, kind) not in QUICK))
    for name, kind in (*((name, "eagle3") for name in (*PUBLISHED, *FAMILIES[2:4])), *OWN_HEADS)
    for mode in ("bf16", "int8", "int4")])
def test_quantized_families(tmp_path, name, mode, kind):
    """In bfloat16 with an int8 cache, and with targets and heads quantized to int8 and int4."""
    if name in PUBLISHED:
        folder = convert_published(tmp_path, name, "bf16")
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, **GROUPED[kind]}
        _, folder = converted(tmp_path, name, "bf16", **sizes)
    if kind == "eagle3":
        add_heads(tmp_path, folder, 64)
    elif kind != "mtp":
        write_head(tmp_path / "head", *published_head(kind, load_model(folder)[0]))
        kind = convert(tmp_path / "head", target=folder, quiet=True).name
    if mode != "bf16":
        options = ["--group", "32", "--method", "nearest"] if mode == "int4" else []
        source, folder = folder, tmp_path / mode
        assert quantize(["--checkpoint", str(source), "--mode", mode, "--out", str(folder), *options]) == 0
    target = load_target(folder, Runtime("cpu", kv="int8" if mode == "bf16" else "auto"))
    assert target.model.runs_on_backend
    jobs = requests(6, seed=5)
    expected = alone((target.model, None), jobs, stop_ids=target.config["stop_ids"])
    engine = target.engine(DraftOptions(kind, tree=TreeShape(8, 2, 3)), batch=3, max_seq_len=300)
    check_outputs(decode(engine, jobs, random.Random(1)), expected, jobs)


# -- KV caches in fp8 (PyTorch) and in int8 (kernels) -------------------------------------------------------


PROMPT = [256, *b"Once upon a time there was a lighthouse keeper"]


@pytest.mark.parametrize("kv, cache_type, dtype", [
    ("fp8", Float8Caches, "bf16"), pytest.param("fp8", Float8Caches, "fp32", marks=pytest.mark.slow),
    *(pytest.param("int8", Int8Caches, dtype, marks=pytest.mark.kernels) for dtype in ("bf16", "fp32")),
])
def test_with_quantized_caches(golden, kv, cache_type, dtype):
    """Three requests in a batch of two, one sampled, longer than a block of cache slots, with accepted paths
    whose nodes are not adjacent.
    """
    target = load_target(golden, Runtime("cpu", dtype, compile=kv == "int8", kv=kv))
    plain = target.engine(DraftOptions(), max_seq_len=130)
    engine = target.engine(DraftOptions("eagle3", tree=TreeShape(12, 2, 4)), batch=2, max_seq_len=130)
    assert type(engine.runner.caches) is cache_type
    inputs, samplings = (
        [PROMPT, PROMPT[3:], [*PROMPT, 65]], [Sampling(70 - i, i % 2, seed=i) for i in range(3)])
    requests: list[Request] = []
    events = [*engine.run(inputs, samplings, requests, watch=True)]
    jobs = list(zip(inputs, samplings))
    expected = [plain.generate([prompt], sampling)[0].ids for prompt, sampling in jobs]
    check_outputs([request.ids for request in requests], expected, jobs)
    paths = [event.draft.path[: len(event.ids)] for event in events if event.draft]
    assert any(b - a > 1 for path in paths for a, b in pairwise(path))
    assert requests[2].cached == len(PROMPT) - 1


def test_float8_rounding():
    x = torch.tensor([449.0, -1e9, torch.inf, 0.001, 2**-10, 3.4, torch.nan])
    assert from_bytes(to_bytes(x), x.dtype)[:6].tolist() == [448, -448, 448, 2**-9, 0, 3.5]
    assert from_bytes(to_bytes(x), x.dtype)[6].isnan()
