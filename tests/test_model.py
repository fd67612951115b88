"""Shapes of models that cannot be: each number that contradicts another is named."""
import dataclasses
import re

import pytest

from checkpoint.folder import check_args, check_config
from common.schema import Wrong
from model import ModelArgs, inverse_frequencies
from networks.head import HeadArgs
from networks.medusa import MultiTokenArgs

CONFIG = {
    "kind": "target", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
}
HEAD = CONFIG | {"kind": "eagle3", "draft_vocab_size": 24, "target_hidden_size": 32, "aux_layers": [1]}
MEDUSA = HEAD | {"kind": "medusa"}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refused(words: str):
    return pytest.raises(Wrong, match=re.escape(words))


@pytest.mark.parametrize("config, change, words", [
    *((CONFIG, {"num_layers": value}, f"num_layers is {words}") for value, words in (
        (0, "0; expected at least 1"), (2.0, "2.0; expected a whole number"), ("4", "'4'; expected a whole"),
        (None, "null; expected a whole number"), (True, "true; expected a whole number"),
        (10_001, "10001; expected at most 10,000"),
    )),
    (CONFIG, {"vocab_size": 10**30}, "vocab_size is 1000000000000000000"),
    (CONFIG, {"num_heads": 3}, "num_kv_heads is 2; expected a divisor of num_heads, 3"),
    (CONFIG, {"head_dim": 7}, "head_dim is 7; expected an even number"),
    (CONFIG, {"num_heads": 2**16, "head_dim": 2**16}, "head_dim is 65536; expected at most 4,194,304"),
    (CONFIG, {"num_experts": 4}, "experts_per_token is 0; expected 1 to num_experts, 4"),
    (CONFIG, {"norm_eps": float("nan")}, "norm_eps is nan; expected a finite number"),
    (CONFIG, {"tie_embeddings": 1}, "tie_embeddings is 1; expected true or false"),
    (CONFIG, {"rope_scaling": -1}, "rope_scaling is -1; expected an object"),
    (CONFIG, {"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 3}}, "expected 4 divisors"),
    (CONFIG, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    (CONFIG, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is"),
    (CONFIG, {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "expected less than high_freq_factor"),
    (CONFIG, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "is 'dynamic'; expected linear or"),
    (CONFIG, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; expected one that is"),
    (CONFIG, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.type is missing; expected one that is"),
    (CONFIG, {"windows": [4]}, "windows is [4]; expected one for each of 2 layers"),
    (CONFIG, {"windows": [4, -1]}, "windows[1] is -1; expected at least 0"),
    (CONFIG, {"activation": "gelu"}, "activation is 'gelu'; expected 'silu', 'gelu_tanh' or 'clamped_swiglu'"),
    (CONFIG, {"local_rope_base": 5.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}, "local_rope_base is"),
    (CONFIG, {"stop_ids": [96]}, "stop_ids[0] is 96; expected an id below vocab_size, 96"),
    (CONFIG, {"quantization": {"mode": "int4", "group": 0, "lm_head": None}}, "quantization.group is 0"),
    (HEAD, {"draft_vocab_size": 97}, "draft_vocab_size is 97; expected at most vocab_size, 96"),
    (HEAD, {"target_hidden_size": 2**22, "aux_layers": [1, 2]}, "target_hidden_size is 4194304; expected"),
    (HEAD, {"aux_layers": []}, "aux_layers is []; expected at least 1 in it"),
    (HEAD, {"aux_layers": [2, 1]}, "aux_layers is [2, 1]; expected ascending layers"),
    (HEAD, {"aux_layers": [1, "2"]}, "aux_layers[1] is '2'; expected a whole number"),
    (HEAD, {"feature_norm": "some"}, "feature_norm is 'some'; expected '', 'each' or 'all'"),
    (MEDUSA, {"guesses": 65}, "guesses is 65; expected at most 64"),
    (MEDUSA, {"aux_layers": [0, 1]}, "aux_layers is [0, 1]; expected one"),
    (MEDUSA, {"target_hidden_size": 16}, "hidden_size is 32; expected target_hidden_size, 16"),
    (HEAD | {"kind": "dflash"}, {"mask_id": 96}, "mask_id is 96; expected an id below vocab_size"),
    (HEAD | {"kind": "dflash"}, {"block": 1}, "block is 1; expected at least 2"),
    (HEAD | {"kind": "dspark"}, {"markov_gated": True}, "markov_rank is 0; expected at least 1"),
], ids=str)
def test_impossible_configs(config, change, words):
    with refused(words):
        check_config(config | change)


@pytest.mark.parametrize("name", sorted(HEAD.keys() - {"kind"}))
def test_a_missing_key_is_named(name):
    with refused(f"{name} is missing; expected a value"):
        check_config({k: v for k, v in HEAD.items() if k != name})


def test_what_is_possible_is_taken():
    assert dataclasses.asdict(check_config(CONFIG | {"somebody_elses": 1})).items() >= (
        CONFIG.items() - {("kind", "target")})
    for scaling in (None, {"type": "default"}, {"type": "linear", "factor": 2.0}, LLAMA3):
        assert inverse_frequencies(check_config(CONFIG | {"rope_scaling": scaling})).shape == (4,)
    for kind in (HeadArgs, MultiTokenArgs):
        check_args(kind.from_config(HEAD))
    with refused("num_heads is 0"):
        check_args(ModelArgs.from_config(CONFIG | {"num_heads": 0}))
