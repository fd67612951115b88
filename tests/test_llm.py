"""The Python API: all types of prompts, and one-line errors for wrong types or names."""
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import InputError
from engine import target as targets
from engine.drafting import DraftOptions
from engine.sampling import Sampling
from llm import LLM

SHORT = {"max_new_tokens": 4}
TURN = {"role": "user", "content": "Hello"}
WRONG = (  # arguments of LLM after the checkpoint, options, and the start of the error
    (("eagle-3",), {}, "speculate eagle-3: unknown (did you mean eagle3?); choose from"),
    ((DraftOptions("eagle3"),), {"tree": "paper"}, "draft and tree are fields of DraftOptions: set them"),
    ((), {"device": 7}, "device cuda:7: "), ((), {"dtype": 16}, "dtype is 16; expected a valid string"),
    ((), {"dtype": torch.int8}, "dtype 'int8': unknown; choose from bf16"),
    ((), {"kv": "fp8"}, "kv fp8: our CPU kernels support only int8 caches; "),
    ((), {"model": "other"}, "checkpoint "),
    ((), {"max_seq_length": 99}, "max_seq_length: no such option (did you mean max_seq_len?)"),
)
PROMPTS = (  # arguments of generate: prompts, sampling options, and the start of the error
    *((one, {}, f"prompt is {one!r}; expected text, token ids, or a list of messages")
      for one in (5, {"role": "user"}, [1, "a"], [{"content": "Hello"}])),
    *((one, {}, "the prompt is empty: pass") for one in ("", [[]])),
    ("Hello", {"n": 0}, "n is 0; expected"), ("Hello", {"limits": 5}, "limits is 5; expected"),
    ("Hello", {"json_schema": "file.json"}, "the JSON schema is 'file.json'; expected"),
    ("Hello", {"max_tokens": 5}, "max_tokens: no such option (did you mean max_new_tokens?)"),
    ("x" * 200_000, {}, "the prompt has 200,000 characters; prompt and output together"),
    ("x" * 3000, {}, "the prompt has 3,005 tokens; prompt and output together can have at most 1,024 tokens"),
)


def test_prompt_types_give_equal_output(llm):
    """Text, messages and token ids are one prompt; iterables of them are several. n outputs get n seeds."""
    request, ids = llm.generate("Hello", **SHORT), llm.encode("Hello")
    for prompt in ("Hello", [TURN], tuple(ids), torch.tensor(ids), list(np.array(ids))):
        assert llm.generate(prompt, **SHORT).ids == llm.chat(prompt, **SHORT).ids == request.ids
    assert "".join(event.text for event in llm.stream("Hello", **SHORT)) == request.text
    for prompts in (("Hello", [TURN], tuple(ids)), iter(["Hello", [TURN], ids]), torch.tensor([ids] * 3)):
        assert [r.ids for r in llm.generate(prompts, **SHORT)] == [request.ids] * 3
    assert llm.generate([], **SHORT) == []
    for decode in llm.generate, llm.chat:
        sampled = decode([TURN], n=2, temperature=1.0, seed=3, **SHORT)
        assert [r.sampling.seed for r in sampled] == [3, 4] and len(repr(sampled)) < 300
    sampled = llm.generate(["Hello"] * 2, temperature=1.0, seed=3, **SHORT)
    assert [r.sampling.seed for r in sampled] == [3, 4]


@pytest.mark.parametrize("options", [{"compile": False}, {}], ids=["PyTorch", "CPU kernels"])
@pytest.mark.parametrize("sampling", [Sampling(9), Sampling(9, 1.0, top_k=40, top_p=0.9, logprobs=1)],
                         ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_fail_only_their_request(golden, tmp_path, options, sampling):
    """Token 9 has a NaN embedding. Other requests, also in the same slot, have their usual output."""
    folder = shutil.copytree(golden, tmp_path / "target")
    state = load_file(weights := folder / "model.safetensors")
    state["embed.weight"][9] = torch.nan
    save_file(state, weights)
    usual, llm = (LLM(x, "eagle3", tree="12,3,3", dtype="fp32", batch_size=2, **options)
                  for x in (golden, folder))
    prompts, requests = [[66] * 40, [65] * 38 + [9], [65] * 12, [68] * 9, [67] * 50, [64] * 40], []
    one, forced = replace(sampling, max_new_tokens=1), replace(sampling, logit_bias={9: 100})
    samplings = [one, sampling, sampling, sampling, forced, sampling]
    expected = [r.ids for r in usual.engine.generate(prompts, samplings)]
    list(llm.engine.run(prompts, samplings, requests))
    expected[1], expected[4] = [], [9]
    assert [r.ids for r in requests] == expected
    assert [9 in ids for ids in expected] == [False] * 4 + [True, False]
    assert [r.finish for r in requests] == ["length", "error", "length", "length", "error", "length"]
    with pytest.raises(InputError, match=r"^the model's logits are not finite: use --dtype fp32, or "):
        llm.generate([9], max_new_tokens=4)


def test_numpy_and_torch_values_and_a_dictionary_schema_are_accepted(golden, llm):
    options = {"max_new_tokens": np.int64(20), "temperature": np.float32(0.5), "seed": torch.tensor(3)}
    other = LLM(model=golden, speculate=None, device=torch.device("cpu"), dtype=torch.float32, compile=False)
    assert repr(other) == f"LLM({golden}, none, 8 x 1024 tokens)"
    expected = llm.generate("Hello", max_new_tokens=20, temperature=0.5, seed=3)
    assert other.generate("Hello", **options).ids == expected.ids
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert json.loads(llm.generate("Hello", json_schema=schema, max_new_tokens=50).text) == {"a": 1}


def test_wrong_types_and_options_raise_input_errors(golden, llm, monkeypatch):
    monkeypatch.setattr(InputError, "in_command", False)
    calls = [(lambda p=p, o=o: llm.generate(p, **o), message) for p, o, message in PROMPTS]
    calls += [(lambda a=a, o=o: LLM(golden, *a, **o), message) for a, o, message in WRONG]
    calls += [(lambda call=call: call("Hello", variables=5), "variables is 5; expected")
              for call in (llm.generate, llm.stream, llm.chat)]
    calls += [(LLM, "checkpoint is None, model None: pass exactly one"),
              (lambda: llm.chat(["a"]), "prompt is ['a'"), (lambda: llm.chat([]), "the prompt is empty"),
              (lambda: llm.stream("a", n=2), "n: a stream has one output")]
    for call, message in calls:
        with pytest.raises(InputError, match="^" + re.escape(message)):
            call()


@pytest.mark.parametrize("free, batch, max_seq_len", [
    (None, 1, 2048), (1 << 40, 64, 10_000), (75 << 20, 1, 8192), (75 << 20, 2, 4096), (0, 1, 2048),
])
def test_default_context_takes_a_quarter_of_free_memory(llm, monkeypatch, free, batch, max_seq_len):
    """At 2 kB per token, rounded down to a power of two; at least 2,048 tokens."""
    monkeypatch.setattr(targets, "free_memory", lambda device: free)
    monkeypatch.setattr(llm.target.model, "args", replace(llm.target.model.args, max_seq_len=10_000))
    assert llm.target.default_max_seq_len(DraftOptions(), batch) == max_seq_len
