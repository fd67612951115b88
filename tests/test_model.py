"""Shapes of models that cannot be: each number that contradicts another is named."""
import re

import pytest

from checkpoint.load import check_config
from common.schema import InvalidValue

CONFIG = {
    "kind": "target", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "somebody_elses": 1,
}
HEAD = CONFIG | {"kind": "eagle3", "draft_vocab_size": 24, "target_hidden_size": 32, "aux_layers": [1]}


@pytest.mark.parametrize("config, change, words", [
    (CONFIG, {"vocab_size": None}, "vocab_size is None; expected a valid integer"),
    (CONFIG, {"num_layers": 10_001}, "num_layers is 10001; expected less than or equal to 10000"),
    (CONFIG, {"num_heads": 3}, "num_kv_heads is 2; expected a divisor of num_heads, 3"),
    (CONFIG, {"head_dim": 7}, "head_dim is 7; expected an even number"),
    (CONFIG, {"num_experts": 4}, "experts_per_token is 0; expected 1 to num_experts, 4"),
    (CONFIG, {"norm_eps": float("nan")}, "norm_eps is nan; expected a finite number"),
    (CONFIG, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; expected a value"),
    (CONFIG, {"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 3}}, "expected 4 divisors"),
    (CONFIG, {"activation": "gelu"}, "activation is 'gelu'; expected one of silu, gelu_tanh"),
    (CONFIG, {"quantization": {"mode": "int4", "group": 0, "lm_head": None}}, "quantization.group is 0"),
    (HEAD, {"draft_vocab_size": 97}, "draft_vocab_size is 97; expected at most vocab_size, 96"),
    (HEAD, {"aux_layers": [2, 1]}, "aux_layers is (2, 1); expected ascending layers"),
    (HEAD | {"kind": "dflash"}, {"mask_id": 96}, "mask_id is 96; expected an id below vocab_size"),
], ids=str)
def test_impossible_configs(config, change, words):
    with pytest.raises(InvalidValue, match=re.escape(words)):
        check_config(config | change)
    assert check_config(config | {"mask_id": 95, "block_size": 4}).num_layers == 2
