"""Configs of transformers: activations, sliding windows and scaled RoPE, as fields of ModelArgs."""
from __future__ import annotations

import json
import math
from pathlib import Path

from checkpoint.dense import KEYS, NEEDED, rope_of, rope_type
from checkpoint.load import CONFIG, check_rope, rope_fields
from common.cli import log_stderr
from common.errors import InputError
from common.schema import ABSENT, InvalidValue, named

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Fields of `families.variants.VariantArgs`: keys of configs, which are 1 or null where nothing changes.
FACTORS = {
    "query_scalar": "query_pre_attn_scalar", "embedding_factor": "embedding_multiplier",
    "residual_factor": "residual_multiplier", "logit_divisor": "logits_scaling",
    "logit_cap": "final_logit_softcapping", "score_cap": "attn_logit_softcapping",
}
# Linear scaling without an original length: a longer context is taken as scaled already.
MAX_UNSCALED_LENGTH = 8192


def model_fields(path: Path, config: dict) -> dict:
    """Return the fields of ModelArgs that every config states; absent keys have LLaMA's values.

    Raises InputError for anything that we would compute wrongly.
    """
    usual = config.get("hidden_act")  # read here even if it does not count, see `reject_unread`
    activation = config.get("hidden_activation") or usual or "silu"
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: activation {activation!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    where = path / CONFIG if path.suffix != ".gguf" else path
    rope, local = _rope_of_kinds(path, config, rope_of(config))
    for name in NEEDED:
        if config.get(KEYS[name][0]) is None:
            raise InputError(f"{where}: {InvalidValue(KEYS[name][0], ABSENT, 'a whole number')}")
    fields = {name: config.get(key, default) for name, (key, default) in KEYS.items()}
    fields["rope_scaling"], longest = _rope_scaling(where, config, rope, fields["max_seq_len"])
    fields |= {
        "num_kv_heads": config.get("num_key_value_heads", fields["num_heads"]),
        "head_dim": config.get("head_dim", fields["hidden_size"] // fields["num_heads"]),
        "rope_base": rope.get("rope_theta", fields["rope_base"]), "max_seq_len": longest,
    }
    if config.get("rope_parameters") and config.get("rope_scaling"):
        log_stderr(f"warning: {where}: has rope_parameters and rope_scaling; the latter counts, with"
                   f" rope_theta {fields['rope_base']:g}")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    special = {  # written only where they are set
        "windows": _windows(where, config, fields["num_layers"], longest if local is None else math.inf),
        "local_rope_base": local, "rotary_dim": int(fields["head_dim"] * share) if share != 1 else None,
        "activation": ACTIVATIONS[activation] if ACTIVATIONS[activation] != "silu" else None,
        **{name: config.get(key) for name, key in FACTORS.items() if config.get(key) != 1},
    }
    if factor := config.get("attention_multiplier"):  # of scores, in place of 1 / sqrt(head_dim)
        special["query_scalar"] = factor**-2
    return fields | {name: value for name, value in special.items() if value}


def reject(path: Path, config: dict, *keys: str) -> None:
    """Raise InputError if one of these keys is set: each stands for something we would compute wrongly."""
    for key in keys:
        if config.get(key):
            raise InputError(f"{path}: {key} {json.dumps(config[key])[:60]} is not supported")


def _windows(path: Path, config: dict, layers: int, longest: float) -> list[int]:
    """Return the sliding window of each layer, 0: none; [] if none is shorter than `longest` tokens."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else 0
    names = config.get("layer_types") or ()
    # Read even if layer_types replaces them, see `reject_unread`.
    first, period = config.get("max_window_layers", 0), config.get("sliding_window_pattern", layers + 1)
    if kinds := ["full_attention" if kind == "attention" else kind for kind in names]:
        if {*kinds} == {"full_attention"}:
            return []
        if {*kinds} - {"full_attention", "sliding_attention"} or len(kinds) < layers or not window:
            raise InputError(f"{path}: layer_types { {*kinds} } with a window of {window}; expected for"
                             f" each of {layers} layers full_attention or, with a window, sliding_attention")
        full = [kind == "full_attention" for kind in kinds[:layers]]
    else:
        full = [i < first or (i + 1) % period == 0 for i in range(layers)]
    windows = [0 if is_full else window or 0 for is_full in full]
    return windows if any(0 < n < longest for n in windows) else []


def _rope_of_kinds(path: Path, config: dict, rope: dict) -> tuple[dict, float | None]:
    """Return the RoPE parameters of full attention, and the base of sliding attention if it differs."""
    local = config.get("rope_local_base_freq")
    if not any(isinstance(v, dict) for v in rope.values()):
        return rope, local
    full, sliding = (rope.get(kind) for kind in ("full_attention", "sliding_attention"))
    if not full or not sliding or sliding.get("rope_type", "default") != "default":
        raise InputError(f"{path}: rope parameters of kinds of layers other than full_attention and, without"
                         " scaling, sliding_attention")
    local = sliding.get("rope_theta", local)
    same = rope_type(full) == "default" and local == full.get("rope_theta")
    return full, None if same else local


def _rope_scaling(path: Path, config: dict, rope: dict, longest: int) -> tuple[dict | None, int]:
    """Return the field rope_scaling and the longest context after scaling. rope: the config's parameters."""
    if (kind := rope_type(rope)) in ("default", "mrope"):  # mrope: equal positions for text
        return None, longest
    key = "original_max_position_embeddings"
    given = config.get(key) if rope.get(key) is None else rope[key]
    if beta := rope.get("llama_4_scaling_beta"):  # of queries beyond the original length
        longest = min(longest, given or longest)
        log_stderr(f"warning: {path}: llama_4_scaling_beta {beta} is not supported, so texts end at {longest}"
                   " tokens, before it changes anything")
    if kind in ("longrope", "su"):
        return _longrope(path, config, rope, longest), longest
    # With linear scaling and YaRN, max_position_embeddings is often the original length (Vicuna, Qwen2.5).
    grows = kind == "yarn" or (kind == "linear" and (given is not None or longest <= MAX_UNSCALED_LENGTH))
    original = longest if given is None else given
    values = {name: rope.get(name) for name in rope_fields(kind)}
    values |= {key: original} if kind == "yarn" else {}
    scaling = {"rope_type": kind} | {name: value for name, value in values.items() if value is not None}
    with named(path):
        check_rope(scaling)
    if grows and not beta:
        longest = max(longest, int(original * scaling["factor"]))
    return scaling, longest


def _longrope(path: Path, config: dict, scaling: dict, longest: int) -> dict:
    """Return the field rope_scaling of longrope."""
    key = "original_max_position_embeddings"
    original = config.get(key) or scaling.get(key) or longest
    factor = scaling.get("factor") or longest / original
    default_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_type": "divisors", "divisors": scaling["short_factor"], "long_divisors": scaling["long_factor"],
        "original_max_position_embeddings": original,
        "attention_factor": scaling.get("attention_factor") or default_factor,
    }
