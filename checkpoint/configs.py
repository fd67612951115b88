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
# Fields of `families.variants.VariantArgs`: config keys, whose values 1 and null have no effect.
FACTORS = {
    "query_scalar": "query_pre_attn_scalar", "embedding_factor": "embedding_multiplier",
    "residual_factor": "residual_multiplier", "logit_divisor": "logits_scaling",
    "logit_cap": "final_logit_softcapping", "score_cap": "attn_logit_softcapping",
}
# Linear scaling without an original length: a longer max_position_embeddings already includes the factor.
MAX_UNSCALED_LENGTH = 8192


def model_fields(path: Path, config: dict) -> dict:
    """Return the fields of ModelArgs that every config has; absent keys have LLaMA's values.

    Raises InputError on settings that are not supported.
    """
    hidden_act = config.get("hidden_act")  # read even if hidden_activation overrides it, see `reject_unread`
    activation = config.get("hidden_activation") or hidden_act or "silu"
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: activation {activation!r} is not supported ({', '.join(ACTIVATIONS)} are)")
    where = path / CONFIG if path.suffix != ".gguf" else path
    rope, local_base = _rope_by_layer_type(path, config, rope_of(config))
    for name in NEEDED:
        if config.get(KEYS[name][0]) is None:
            raise InputError(f"{where}: {InvalidValue(KEYS[name][0], ABSENT, 'a whole number')}")
    fields = {name: config.get(key, default) for name, (key, default) in KEYS.items()}
    fields["rope_scaling"], max_length = _rope_scaling(where, config, rope, fields["max_seq_len"])
    fields |= {
        "num_kv_heads": config.get("num_key_value_heads", fields["num_heads"]),
        "head_dim": config.get("head_dim", fields["hidden_size"] // fields["num_heads"]),
        "rope_base": rope.get("rope_theta", fields["rope_base"]), "max_seq_len": max_length,
    }
    if config.get("rope_parameters") and config.get("rope_scaling"):
        log_stderr(f"warning: {where}: has rope_parameters and rope_scaling; rope_scaling is used, with"
                   f" rope_theta {fields['rope_base']:g}")
    rotary_fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    optional = {  # written only if they are set
        "windows": _windows(where, config, fields["num_layers"], math.inf if local_base else max_length),
        "local_rope_base": local_base,
        "rotary_dim": int(fields["head_dim"] * rotary_fraction) if rotary_fraction != 1 else None,
        "activation": ACTIVATIONS[activation] if ACTIVATIONS[activation] != "silu" else None,
        **{name: config.get(key) for name, key in FACTORS.items() if config.get(key) != 1},
    }
    if factor := config.get("attention_multiplier"):  # of scores, in place of 1 / sqrt(head_dim)
        optional["query_scalar"] = factor**-2
    return fields | {name: value for name, value in optional.items() if value}


def reject(path: Path, config: dict, *keys: str) -> None:
    """Raise InputError if one of these keys, which are not supported, is set."""
    for key in keys:
        if config.get(key):
            raise InputError(f"{path}: {key} {json.dumps(config[key])[:60]} is not supported")


def _windows(path: Path, config: dict, layers: int, max_length: float) -> list[int]:
    """Return the sliding window of each layer, 0: none; [] if none is shorter than `max_length` tokens."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else 0
    names = config.get("layer_types") or ()
    # Read even if layer_types replaces them, see `reject_unread`.
    first, period = config.get("max_window_layers", 0), config.get("sliding_window_pattern", layers + 1)
    if types := ["full_attention" if name == "attention" else name for name in names]:
        if {*types} == {"full_attention"}:
            return []
        if {*types} - {"full_attention", "sliding_attention"} or len(types) < layers or not window:
            raise InputError(f"{path}: layer_types { {*types} } with a window of {window}; expected for"
                             f" each of {layers} layers full_attention or, with a window, sliding_attention")
        full = [name == "full_attention" for name in types[:layers]]
    else:
        full = [i < first or (i + 1) % period == 0 for i in range(layers)]
    windows = [0 if is_full else window or 0 for is_full in full]
    return windows if any(0 < n < max_length for n in windows) else []


def _rope_by_layer_type(path: Path, config: dict, rope: dict) -> tuple[dict, float | None]:
    """Return the RoPE parameters of full attention, and the base of sliding attention if different."""
    local_base = config.get("rope_local_base_freq")
    if not any(isinstance(v, dict) for v in rope.values()):
        return rope, local_base
    full, sliding = (rope.get(layer_type) for layer_type in ("full_attention", "sliding_attention"))
    if not full or not sliding or sliding.get("rope_type", "default") != "default":
        raise InputError(f"{path}: rope_parameters by layer type are supported for full_attention and,"
                         " without scaling, sliding_attention only")
    local_base = sliding.get("rope_theta", local_base)
    same = rope_type(full) == "default" and local_base == full.get("rope_theta")
    return full, None if same else local_base


def _rope_scaling(path: Path, config: dict, rope: dict, max_length: int) -> tuple[dict | None, int]:
    """Return the field rope_scaling and the maximum length after scaling. rope: the config's parameters."""
    if (scaling_type := rope_type(rope)) in ("default", "mrope"):  # mrope: for text tokens, plain RoPE
        return None, max_length
    key = "original_max_position_embeddings"
    original = config.get(key) if rope.get(key) is None else rope[key]
    if beta := rope.get("llama_4_scaling_beta"):  # scales queries beyond the original length
        max_length = min(max_length, original or max_length)
        log_stderr(f"warning: {path}: llama_4_scaling_beta {beta} is not supported; the context is limited to"
                   f" {max_length} tokens, up to which it has no effect")
    if scaling_type in ("longrope", "su"):
        return _longrope(path, config, rope, max_length), max_length
    # With linear scaling and YaRN, max_position_embeddings is often the original length (Vicuna, Qwen2.5).
    extends = scaling_type == "yarn" or (
        scaling_type == "linear" and (original is not None or max_length <= MAX_UNSCALED_LENGTH))
    original = max_length if original is None else original
    values = {"rope_type": scaling_type} | {name: rope.get(name) for name in rope_fields(scaling_type)}
    values |= {key: original} if scaling_type == "yarn" else {}
    scaling = {name: value for name, value in values.items() if value is not None}
    with named(path):
        check_rope(scaling)
    if extends and not beta:
        max_length = max(max_length, int(original * scaling["factor"]))
    return scaling, max_length


def _longrope(path: Path, config: dict, scaling: dict, max_length: int) -> dict:
    """Return the field rope_scaling of longrope."""
    key = "original_max_position_embeddings"
    original = config.get(key) or scaling.get(key) or max_length
    factor = scaling.get("factor") or max_length / original
    default_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_type": "divisors", "divisors": scaling["short_factor"], "long_divisors": scaling["long_factor"],
        "original_max_position_embeddings": original,
        "attention_factor": scaling.get("attention_factor") or default_factor,
    }
