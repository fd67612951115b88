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
    assert "; expected " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, words", [
    *(({name: value}, f"{name} is {found}; expected a whole number from 1 to ") for name in CONFIG
      for value, found in ((0, "0"), (-1, "-1"), (2.0, "2.0"), ("4", "'4'"), (None, "null"), (True, "true"),
                           (10**30, "a whole number of 31 digits"))),
    ({"num_layers": 10_001}, "num_layers is 10001; expected a whole number from 1 to 10,000"),
    ({"num_experts": 10_001, "experts_per_token": 1}, "num_experts is 10001; expected"),
    ({"num_heads": 3}, "num_kv_heads is 2; expected a divisor of num_heads, 3"),
    ({"head_dim": 7}, "head_dim is 7; expected an even number"),
    ({"num_heads": 2**16, "head_dim": 2**16}, "head_dim is 65536; expected at most 4,194,304 over num_heads"),
    ({"num_experts": 4}, "experts_per_token is 0; expected 1 to num_experts, 4"),
    ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token is 5; expected 1 to num_experts, 4"),
    ({"norm_eps": float("nan")}, "norm_eps is nan; expected a number above 0 to 1"),
    ({"rope_base": float("inf")}, "rope_base is inf; expected a number above 1 to 1e+15"),
    ({"tie_embeddings": 1}, "tie_embeddings is 1; expected true or false"),
    ({"rope_scaling": -1}, "rope_scaling is -1; expected null or the parameters of a rope scaling"),
    ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 3}},
     "rope_scaling.divisors is [1.0, 1.0, 1.0]; expected 4 numbers"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing; expected a number from"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "rope_scaling.factor is nan"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
    *(({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != name}}, f"rope_scaling.{name} is missing")
      for name in LLAMA3 if name != "rope_type"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0; expected less than high_"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'; expected linear or"),
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; expected one that is"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.type is missing; expected one that is supported"),
], ids=str)
def test_impossible_targets(change, words):
    refused(ModelArgs, CONFIG | change, words)


@pytest.mark.parametrize("name", sorted(HEAD.keys() - CONFIG.keys()))
def test_what_a_head_lacks_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is missing; expected"):
        HeadArgs.from_config({k: v for k, v in HEAD.items() if k != name})


@pytest.mark.parametrize("name", CONFIG)
def test_a_missing_number_is_named(name):
    with pytest.raises(ValueError, match=f"{name} is missing; expected a whole number"):
        ModelArgs.from_config({k: v for k, v in CONFIG.items() if k != name})


@pytest.mark.parametrize("change, words", [
    ({"draft_vocab_size": 0}, "draft_vocab_size is 0; expected a whole number from 1"),
    ({"draft_vocab_size": 97}, "draft_vocab_size is 97; expected at most vocab_size, 96"),
    ({"target_hidden_size": 2**22, "aux_layers": (1, 2)}, "target_hidden_size is 4194304; expected at most"),
    ({"aux_layers": ()}, "aux_layers is []; expected a list of 1 to 1,000, ascending"),
    ({"aux_layers": (2, 1)}, "aux_layers is [2, 1]; expected a list of 1 to 1,000, ascending"),
    ({"aux_layers": (1, 1)}, "aux_layers is [1, 1]; expected a list of 1 to 1,000, ascending"),
    ({"aux_layers": (1, "2")}, "aux_layers[1] is '2'; expected a whole number"),
    ({"own_lm_head": "64"}, "own_lm_head is '64'; expected true or false"),
    ({"feature_norm": "some"}, "feature_norm is 'some'; expected '' or 'each' or 'all'"),
    ({"num_heads": 0}, "num_heads is 0; expected"),
], ids=str)
def test_impossible_heads(change, words):
    refused(HeadArgs, HEAD | change, words)


@pytest.mark.parametrize("change, words", [
    ({"guesses": 0}, "guesses is 0; expected a whole number from 1 to 64"),
    ({"blocks": 65}, "blocks is 65; expected a whole number from 1 to 64"),
    ({"aux_layers": (0, 1)}, "aux_layers is [0, 1]; expected one"),
    ({"target_hidden_size": 16}, "hidden_size is 32; expected target_hidden_size, 16"),
    ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
], ids=str)
def test_impossible_medusa_heads(change, words):
    refused(MultiTokenArgs, HEAD | change, words)


def test_what_is_possible_is_taken():
    assert dataclasses.asdict(ModelArgs.from_config(CONFIG | {"somebody_elses": 1})).items() >= CONFIG.items()
    for scaling in (None, {"type": "default"}, {"type": "linear", "factor": 2.0}, LLAMA3):
        assert inverse_frequencies(ModelArgs.from_config(CONFIG | {"rope_scaling": scaling})).shape == (4,)
    HeadArgs.from_config(HEAD), MultiTokenArgs.from_config(HEAD)
