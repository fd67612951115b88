"""The Python API: all kinds of prompts, and clear errors for wrong types or names."""
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import InputError
from engine import target as targets
from engine.drafting import DraftOptions
from llm import LLM

FEW = {"max_new_tokens": 4}
TURN = {"role": "user", "content": "Hello"}
WRONG = (  # of LLM, arguments after the checkpoint, and what is said
    (("eagle-3",), {}, "speculate eagle-3: unknown (did you mean eagle3?); choose from"),
    ((DraftOptions("eagle3"),), {"tree": "paper"}, "draft and tree are fields of DraftOptions: set them"),
    ((), {"device": 7}, "device cuda:7: "), ((), {"dtype": 16}, "dtype is 16; expected a valid string"),
    ((), {"dtype": torch.int8}, "dtype 'int8': unknown; choose from bf16"),
    ((), {"kv": "fp8"}, "kv fp8: our CPU kernels have int8 caches and none in fp8; "),
    ((), {"model": "other"}, "checkpoint "),
    ((), {"max_seq_length": 99}, "max_seq_length: no such option (did you mean max_seq_len?)"),
)
PROMPTS = (  # of generate: prompts, sampling options, and what is said
    *((one, {}, f"prompt is {one!r}; expected a text, token ids, or a list with messages")
      for one in (5, {"role": "user"}, [1, "a"], [{"content": "Hello"}])),
    *((one, {}, "the prompt is empty: give") for one in ("", [[]])),
    ("Hello", {"n": 0}, "n is 0; expected"), ("Hello", {"limits": 5}, "limits is 5; expected"),
    ("Hello", {"json_schema": "file.json"}, "the JSON schema is 'file.json'; expected"),
    ("Hello", {"max_tokens": 5}, "max_tokens: no such option (did you mean max_new_tokens?)"),
    ("x" * 200_000, {}, "the prompt has 200,000 characters; prompt and output together"),
    ("x" * 3000, {}, "the prompt has 3,005 tokens; prompt and output together can have at most 1,024 tokens"),
)


def test_a_text_ids_and_messages_are_one_prompt_and_a_list_of_them_several(llm):
    text, ids = llm.generate("Hello", **FEW), llm.encode("Hello")
    for one in ("Hello", [TURN], tuple(ids), torch.tensor(ids), list(np.array(ids))):
        assert llm.generate(one, **FEW).ids == llm.chat(one, **FEW).ids == text.ids
    assert "".join(event.text for event in llm.stream("Hello", **FEW)) == text.text
    for several in (("Hello", [TURN], tuple(ids)), iter(["Hello", [TURN], ids]), torch.tensor([ids] * 3)):
        assert [request.ids for request in llm.generate(several, **FEW)] == [text.ids] * 3
    assert llm.generate([], **FEW) == []
    for draw in llm.generate, llm.chat:
        drawn = draw([TURN], n=2, temperature=1.0, seed=3, **FEW)
        assert [request.sampling.seed for request in drawn] == [3, 4] and len(repr(drawn)) < 300
    drawn = llm.generate(["Hello"] * 2, temperature=1.0, seed=3, **FEW)
    assert [request.sampling.seed for request in drawn] == [3, 4]


def test_numbers_of_numpy_types_of_torch_and_a_schema_as_a_dictionary(golden, llm):
    options = {"max_new_tokens": np.int64(20), "temperature": np.float32(0.5), "seed": torch.tensor(3)}
    given = LLM(model=golden, speculate=None, device=torch.device("cpu"), dtype=torch.float32, compile=False)
    assert repr(given) == f"LLM({golden}, none, 8 x 1024 tokens)"
    usual = llm.generate("Hello", max_new_tokens=20, temperature=0.5, seed=3)
    assert given.generate("Hello", **options).ids == usual.ids
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    assert json.loads(llm.generate("Hello", json_schema=schema, max_new_tokens=50).text) == {"a": 1}


def test_wrong_types_and_options_get_a_sentence(golden, llm, monkeypatch):
    monkeypatch.setattr(InputError, "in_command", False)
    calls = [(lambda p=p, o=o: llm.generate(p, **o), words) for p, o, words in PROMPTS]
    calls += [(lambda a=a, o=o: LLM(golden, *a, **o), words) for a, o, words in WRONG]
    calls += [(lambda call=call: call("Hello", variables=5), "variables is 5; expected")
              for call in (llm.generate, llm.stream, llm.chat)]
    calls += [(LLM, "checkpoint is None, model None: give one"),
              (lambda: llm.chat(["a"]), "prompt is ['a'"), (lambda: llm.chat([]), "the prompt is empty"),
              (lambda: llm.stream("a", n=2), "n: a stream has one output")]
    for call, words in calls:
        with pytest.raises(InputError, match="^" + re.escape(words)):
            call()


@pytest.mark.parametrize("free, batch, room", [
    (None, 1, 2048), (1 << 40, 64, 10_000), (75 << 20, 1, 8192), (75 << 20, 2, 4096), (0, 1, 2048),
])
def test_the_context_is_what_fits_in_memory(llm, monkeypatch, free, batch, room):
    """A quarter of free memory at 2 kB a token, rounded to a power of two, at least 2,048."""
    monkeypatch.setattr(targets, "free_memory", lambda device: free)
    monkeypatch.setattr(llm.target.model, "args", replace(llm.target.model.args, max_seq_len=10_000))
    assert llm.target.default_max_seq_len(DraftOptions(), batch) == room
