"""Where and how a target cannot run, and what it cannot decode, is refused before anything is compiled."""
from types import SimpleNamespace

import pytest

from common.errors import InputError
from engine.engine import Engine
from engine.prompt import encode
from engine.runtime import Runtime
from engine.target import Target, load_target
from sampling.options import Sampling
from tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def target(golden) -> Target:
    return load_target(golden, Runtime(device="cpu", compile=False))


def test_prompts_that_have_no_ids():
    assert encode(None, [1, 2]) == [1, 2] and encode(None, []) == []
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        with pytest.raises(InputError, match=r"no tokenizer: give token ids \(--prompt-ids\)"):
            encode(None, prompt)
    with pytest.raises(InputError, match=r"--system\) needs the chat template"):
        encode(SimpleNamespace(has_template=False), "text", system="be brief")


def test_control_tokens_count_as_such_in_raw_prompts_only(golden):
    tokenizer = Tokenizer.load(golden)
    assert encode(tokenizer, "<eos>a", raw=True) == [257, 97]
    assert encode(tokenizer, "<eos>a", raw=True, parse_special=False) == list(b"<eos>a")
    assert 257 not in encode(tokenizer, "<eos>a")


def test_caches_that_do_not_fit(target, monkeypatch):
    monkeypatch.setattr("engine.passes.free_memory", lambda device: 3_000_000)
    with pytest.raises(ValueError, match=r"the caches of 9 x \d+ slots need \d\.\d GB, 0\.0 GB are free"):
        target.engine(batch=9)
    monkeypatch.setattr("engine.passes.free_memory", lambda device: None)  # not known: not refused
    target.engine(batch=9)


def test_requests_that_cannot_be_decoded(target):
    """Refused before anything is decoded, with the numbers."""
    engine = Engine(target.model, batch=2, max_seq_len=32, compile=False)
    for prompts, sampling, words in (
        ([[]], Sampling(4), "the prompt is empty"), ([[1], []], Sampling(4), "prompt 2 is empty"),
        ([[1] * 32], Sampling(4), "32 tokens and needs room for one more, the cache holds 32"),
        ([[320]], Sampling(4), r"token id 320, the vocabulary is 0\.\.319"),
        ([[-1]], Sampling(4), "token id -1"),
        ([[1]], Sampling(logit_bias={999999: 1}), r"logit_bias holds token id 999999, the vocabulary is 0"),
        ([[1]], Sampling(stop="x"), "--stop"),
        ([[1]], Sampling(json_schema="{}"), "needs a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(prompts, sampling)
        assert engine.free == 2
    engine.admit([1]), engine.admit([2])
    with pytest.raises(RuntimeError, match="all 2 places are taken"):
        engine.admit([3])
