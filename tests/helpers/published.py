"""Configs of published models and heads (`published.json`: their text parts as published), reduced to tiny
sizes.
"""
import json
from pathlib import Path

import torch
import transformers

from checkpoint.convert import convert
from helpers.blocks import published
from helpers.families import EARS, EYES, LAYERS, V, as_thinker
from helpers.heads import GEMMA4_LAYER, make_head

PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text())
# Draft heads: their target in PUBLISHED, kind of `blocks.published` or EAGLE-3 with Gemma 4's layer, config.
HEADS = json.loads(Path(__file__).with_name("published_heads.json").read_text())
OF_HEADS = {  # keys of sizes
    "vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "num_key_value_heads", "global_head_dim", "num_target_layers", "target_layer_ids",
    "block_size", "mask_token_id", "markov_rank", "conv_group_size", "selector_rank",
}
CUT = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), V), "num_hidden_layers": LAYERS,
    **dict.fromkeys(("hidden_size", "block_dim", "conv_dim", "conv_dim_out"), 64), "block_multiple_of": 16,
    **dict.fromkeys(("intermediate_size", "block_ff_dim", "shared_intermediate_size"), 96),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4), "num_global_key_value_heads": 1,
    **dict.fromkeys(("num_experts", "n_routed_experts"), 6), "moe_intermediate_size": 32,
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2), "num_kv_shared_layers": 2,
    **dict.fromkeys(("head_dim", "v_head_dim", "mamba_d_head"), 16), "global_head_dim": 32,
    "mamba_n_heads": 8, "mamba_d_state": 12, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "hidden_size_per_layer_input": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mrope_section": [3, 3, 2],
}


def cut(config: dict) -> dict:
    """Return a config with 8 layers and small sizes."""
    def reduced(key: str, value):
        if isinstance(value, dict) and key != "rope_parameters":
            return cut(value)
        if key == "num_key_value_heads":
            return 4 if value == config["num_attention_heads"] else 2
        if key == "full_attn_idxs" and value:
            return [i for i in value if i < LAYERS]
        if isinstance(value, list) and key not in CUT:  # per layer, or per frequency (16 x 0.75 / 2)
            return value[: 6 if key.endswith("_factor") else LAYERS]
        return CUT[key] if key in CUT and value else value

    return {key: reduced(key, value) for key, value in config.items()}


def make_published(folder: Path, name: str) -> torch.nn.Module:
    """Write a tiny random model with the config of a published one; return the transformers model."""
    raw = cut(PUBLISHED[name])
    nested = raw.get("thinker_config", raw)
    family = raw["architectures"][0].removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    text, dropped = nested.get("text_config"), ("architectures", "model_type", "dtype", "torch_dtype")
    vision = EYES.get(family.replace("Unified", "").removesuffix("Moe"), EYES["Qwen3VL"])
    family += "Thinker" * ("thinker_config" in raw)
    options = {k: v for k, v in nested.items() if k not in dropped}
    if text:
        options |= {"vision_config": vision, "text_config": {k: v for k, v in text.items() if k != "dtype"}}
        options.setdefault("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if "audio_config" in nested:
        options["audio_config"] = EARS
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, family + ("ForConditionalGeneration" if text else "ForCausalLM"))(config)
    for n, p in model.float().eval().requires_grad_(False).state_dict().items():
        around_one = n.endswith("layer_scalar") or (n.endswith("norm.weight") and "Gemma" not in family)
        p.normal_(int(around_one), 0.2)
    model.save_pretrained(folder)
    if "thinker_config" in raw:
        as_thinker(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def convert_published(folder: Path, name: str, dtype: str = "keep") -> Path:
    """Convert a model of `make_published`; return its folder."""
    make_published(folder / "in", name)
    return convert(folder / "in", folder / "out", dtype=dtype, quiet=True)


def published_head(name: str, target) -> tuple[dict, dict]:
    """Return (tensors, config) of a tiny random head with the config of a published one."""
    _, label, original = HEADS[name]
    draft, a = 90 if "draft_vocab_size" in original else None, target.args
    if label == "eagle3-gemma4":
        ids = list(range(1, a.num_layers - 1, 2))
        tensors, tiny = make_head(
            "eagle3", draft=a.vocab_size, vocab=a.vocab_size, hidden=a.hidden_size, target=a.hidden_size,
            kv=1, aux=len(ids), qk_norm=True, first="layers.0.", **GEMMA4_LAYER)
        tiny |= {"target_layer_ids": ids, "num_target_layers": a.num_layers}
    else:
        tensors, tiny = published(label, target, draft=draft)
        if not original.get("enable_confidence_head", True):  # DFlash of DeepSpec
            tensors = {n: t for n, t in tensors.items() if "markov" not in n and "confidence" not in n}
    sizes = {key: value for key, value in (
        tiny | tiny.get("dflash_config", {}) | {"draft_vocab_size": draft}).items() if key in OF_HEADS}

    def resized(config: dict) -> dict:
        new = {key: sizes.get(key, value) if value else value for key, value in config.items()}
        new |= {key: resized(value) for key, value in config.items() if isinstance(value, dict)}
        if "layer_types" in config:
            new["layer_types"] = config["layer_types"][-tiny["num_hidden_layers"] :]
        if "aux_hidden_state_layer_ids" in config:
            new["aux_hidden_state_layer_ids"] = [i + 1 for i in sizes["target_layer_ids"]]
        return new

    return tensors, resized(original)
