"""Shapes of models that cannot be: each number that contradicts another is named."""
import dataclasses
import re

import pytest

from model import ModelArgs, inverse_frequencies
from networks.head import HeadArgs
from networks.medusa import MultiTokenArgs

CONFIG = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8,
}
HEAD = CONFIG | {"draft_vocab_size": 24, "target_hidden_size": 32, "aux_layers": (1,)}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refused(kind: type[ModelArgs], config: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        kind.from_config(config)
    assert str(error.value).startswith("config") and "\n" not in str(error.value)


@pytest.mark.parametrize("change, words", [
    *(({name: value}, f"{name} must be a positive integer, got {value!r}") for name in CONFIG
      for value in (0, -1, 2.0, "4", None, True)),
    ({"num_layers": 10_001}, "10001 layers of 0 experts are not plausible"),
    ({"num_experts": 10_001, "experts_per_token": 1}, "10001 experts are not plausible"),
    ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"num_experts": 4}, "experts_per_token 0 is not in 1..4"),
    ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token 5 is not in 1..4"),
    ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 3}}, "3 divisors for 4 frequencies"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type linear lacks 'factor'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "lacks 'original_max_position_embeddings'"),
    *(({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != name}}, f"type llama3 lacks '{name}'")
      for name in LLAMA3 if name != "rope_type"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic' is not supported"),
    ({"rope_scaling": {"type": "longrope"}}, "type 'longrope' is not supported (known: default, linear"),
    ({"rope_scaling": {"factor": 2.0}}, "type None is not supported"),
], ids=str)
def test_impossible_targets(change, words):
    refused(ModelArgs, CONFIG | change, words)


@pytest.mark.parametrize("name", CONFIG)
def test_a_missing_number_is_named(name):
    with pytest.raises(ValueError, match=f"config.json is incomplete: .*'{name}'"):
        ModelArgs.from_config({k: v for k, v in CONFIG.items() if k != name})


@pytest.mark.parametrize("change, words", [
    ({"draft_vocab_size": 0}, "draft_vocab_size 0 is not in 1..96"),
    ({"draft_vocab_size": 97}, "draft_vocab_size 97 is not in 1..96"),
    ({"aux_layers": ()}, "aux_layers must be ascending layer numbers, got []"),
    ({"aux_layers": (2, 1)}, "aux_layers must be ascending layer numbers, got [2, 1]"),
    ({"aux_layers": (1, 1)}, "aux_layers must be ascending layer numbers, got [1, 1]"),
    ({"feature_norm": "some"}, "feature_norm 'some' is none of '', 'each', 'all'"),
    ({"num_heads": 0}, "num_heads must be a positive integer"),
], ids=str)
def test_impossible_heads(change, words):
    refused(HeadArgs, HEAD | change, words)


@pytest.mark.parametrize("change, words", [
    ({"guesses": 0}, "0 guesses of 1 blocks: at least one of each"),
    ({"blocks": 0}, "4 guesses of 0 blocks: at least one of each"),
    ({"aux_layers": (0, 1)}, "read one state of the target"), ({"target_hidden_size": 16}, "have its width"),
    ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
], ids=str)
def test_impossible_medusa_heads(change, words):
    refused(MultiTokenArgs, HEAD | change, words)


def test_what_is_possible_is_taken():
    assert dataclasses.asdict(ModelArgs.from_config(CONFIG | {"somebody_elses": 1})).items() >= CONFIG.items()
    for scaling in (None, {"type": "default"}, {"type": "linear", "factor": 2.0}, LLAMA3):
        assert inverse_frequencies(ModelArgs.from_config(CONFIG | {"rope_scaling": scaling})).shape == (4,)
    HeadArgs.from_config(HEAD), MultiTokenArgs.from_config(HEAD)
