"""Where and how a target cannot run, and what it cannot decode, is refused before anything is compiled."""
from functools import partial
from types import SimpleNamespace

import pytest

from common.errors import InputError
from engine.drafting import Drafting
from engine.engine import Engine
from engine.request import encode
from engine.runtime import Runtime
from engine.sampling import Sampling
from engine.target import Target, load_target
from server.run import largest_engine


@pytest.fixture(scope="module")
def target(golden) -> Target:
    return load_target(golden, Runtime(device="cpu", compile=False))


def test_a_system_prompt_needs_a_template():
    with pytest.raises(InputError, match=r"--system\) needs the chat template"):
        encode(SimpleNamespace(has_template=False), "text", system="be brief")


def test_caches_that_do_not_fit(target, monkeypatch):
    monkeypatch.setattr("engine.runner.free_memory", lambda device: 3_000_000)
    with pytest.raises(ValueError, match=r"the caches of 9 x \d+ slots need \d\.\d GB, 0\.0 GB are free"):
        target.engine(batch=9)
    monkeypatch.setattr("engine.runner.free_memory", lambda device: None)  # not known: not refused
    target.engine(batch=9)


def test_a_server_takes_as_many_slots_as_fit(target, monkeypatch):
    """A card with room for four slots serves four of sixteen; as many as were asked for, or an error."""
    make = partial(largest_engine, target, Drafting(), max_seq_len=300)
    room = make(batch=4, smallest=4).runner.cache_bytes
    monkeypatch.setattr("engine.runner.free_memory", lambda device: room + 1)
    assert make(batch=16, smallest=1).batch == 4
    with pytest.raises(ValueError, match="the caches of 16 x"):
        make(batch=16, smallest=16)


@pytest.mark.parametrize("compile", (False, True))
def test_all_allocated_slots_are_checked(target, compile):
    engine = Engine(target.model, max_seq_len=32, compile=compile)
    assert engine.runner.cache_bytes == sum(buffer.nbytes for buffer in engine.runner.caches.buffers())


def test_requests_that_cannot_be_decoded(target):
    """Refused before anything is decoded, with the numbers."""
    engine = Engine(target.model, batch=2, max_seq_len=32, compile=False)
    for prompts, sampling, words in (
        ([[-1]], Sampling(4), "token id -1"),
        ([[1]], Sampling(logit_bias={999999: 1}), r"logit_bias holds token id 999999, the vocabulary is 0"),
        ([[1]], Sampling(stop="x"), "--stop"),
        ([[1]], Sampling(json_schema="{}"), "needs a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(prompts, sampling)
        assert engine.free == 2
    engine.admit([1]), engine.admit([2])
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        engine.admit([3])
