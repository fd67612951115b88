"""The Python API: prompts of every kind, and a sentence about each wrong type or name."""
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT

from common.errors import InputError
from drafters import Drafting
from engine import target as targets
from llm import LLM

FEW = {"max_new_tokens": 4}
TURN = {"role": "user", "content": "Hello"}
WRONG = (  # arguments of LLM after the checkpoint, and what is said
    (("eagle-3",), {}, "--speculate eagle-3: unknown (did you mean eagle3?); choose from"),
    ((Drafting("eagle3"),), {"tree": "paper"}, "draft and tree are fields of Drafting: set them there"),
    ((), {"device": 7}, "--device cuda:7: "), ((), {"dtype": 16}, "dtype is 16; expected a valid string"),
    ((), {"dtype": torch.int8}, "dtype 'int8': unknown; choose from bf16"),
    ((), {"kv": "fp8"}, "--kv fp8: our CPU kernels have int8 caches and none in fp8; "),
    ((), {"max_seq_length": 99}, "max_seq_length: no such option (did you mean max_seq_len?)"),
)
PROMPTS = (  # prompts, sampling options, and what is said
    *((one, {}, f"prompt is {one!r}; expected a text, token ids, or a list with messages") for one in (
        5, b"abc", {"role": "user"}, [1, "a"], [{"content": "Hello"}],
    )),
    ("Hello", {"max_tokens": 5}, "max_tokens: no such option (did you mean max_new_tokens?)"),
    ("Hello", {"top_p": 0}, "top_p is 0; expected greater than 0"),
    ("x" * 3000, {}, "the prompt has 3005 tokens and needs room for one more, the cache holds 1024: "),
)


def test_a_text_ids_and_messages_are_one_prompt_and_a_list_of_them_several(llm):
    text, turns = llm.generate("Hello", **FEW), llm.generate([TURN], **FEW)
    assert text.ids == turns.ids == llm.chat([TURN], **FEW).ids == llm.chat("Hello", **FEW).ids
    assert "".join(event.text for event in llm.stream("Hello", **FEW)) == text.text
    ids = llm.encode("Hello")
    for several in (["Hello", [TURN], ids], ("Hello", [TURN], tuple(ids)), iter(["Hello", [TURN], ids])):
        assert [request.ids for request in llm.generate(several, **FEW)] == [text.ids] * 3
    for one in (tuple(ids), torch.tensor(ids), np.array(ids), list(np.array(ids))):
        assert llm.generate(one, **FEW).ids == text.ids == llm.chat(one, **FEW).ids
    for several in (torch.tensor([ids]), np.array([ids]), [torch.tensor(ids)]):
        assert [request.ids for request in llm.generate(several, **FEW)] == [text.ids]
    assert llm.generate([], **FEW) == []
    drawn = llm.generate(["Hello"] * 2, temperature=1.0, seed=3, **FEW)
    assert [request.sampling.seed for request in drawn] == [3, 4]


def test_numbers_of_numpy_types_of_torch_and_a_schema_as_a_dictionary(golden, llm):
    options = {"max_new_tokens": np.int64(20), "temperature": np.float32(0.5), "seed": torch.tensor(3)}
    usual = llm.generate("Hello", max_new_tokens=20, temperature=0.5, seed=3)
    for device in torch.device("cpu"), -1:
        given = LLM(golden, None, device=device, dtype=torch.float32, compile=False)
        assert given.generate("Hello", **options).ids == usual.ids
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for given in schema, json.dumps(schema):
        assert json.loads(llm.generate("Hello", json_schema=given, max_new_tokens=50).text) == {"a": 1}


def test_wrong_types_and_options_get_a_sentence(golden, llm):
    for prompt, options, words in PROMPTS:
        with pytest.raises((TypeError, ValueError), match="^" + re.escape(words)):
            llm.generate(prompt, **options)
    for decode in (lambda: list(llm.stream(["a", "b"])), lambda: llm.chat(["a"]), lambda: llm.encode(["a"])):
        with pytest.raises(ValueError, match=r"^prompt is \['a'"):
            decode()
    for args, options, words in WRONG:
        with pytest.raises((InputError, TypeError, ValueError), match="^" + re.escape(words)):
            LLM(golden, *args, **options)


@pytest.mark.parametrize("free, batch, room", [
    (None, 1, 2048), (1 << 40, 64, 10_000), (940 << 20, 1, 10_000), (900 << 20, 1, 8192),
    (384 << 20, 1, 4096), (384 << 20, 2, 2048), (0, 1, 2048),
])
def test_the_context_is_what_fits_in_memory(monkeypatch, free, batch, room):
    """A quarter of what is free, in powers of two, at 24 kB a token; no less than 2,048."""
    monkeypatch.setattr(targets, "free_memory", lambda device: free)
    model = SimpleNamespace(
        args=SimpleNamespace(max_seq_len=10_000, short_length=math.inf),
        embed=SimpleNamespace(weight=torch.zeros(1)), ranks=None,
        cache_bytes=lambda batch, slots: batch * slots * 24 * 1024,
    )
    target = targets.Target(ROOT, None, model, {}, None, print)
    assert target.room(Drafting(), batch) == room
