"""Tiny random models of every family, saved by transformers, and heads for them."""
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from helpers import edit

V, H, LAYERS = 128, 48, 8
SIZES = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_OPTIONS = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1, 1.2, 1.5, 1.5, 2.0, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0], "original_max_position_embeddings": 256,
}
WINDOW = 24  # of families that have one
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
GEMMA3 = {
    "head_dim": 20, "sliding_window": WINDOW, "query_pre_attn_scalar": 36, "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GRANITE = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
GEMMA4 = {
    "head_dim": 12, "global_head_dim": 20, "sliding_window": WINDOW, "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": V, "rope_parameters": None,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
        + ["sliding_attention", "full_attention"],
}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
OLMO3 = {"sliding_window": WINDOW, "rope_parameters": {
    "full_attention": YARN | {"attention_factor": 1.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
LFM2 = {"layer_types": (["conv"] * 2 + ["full_attention"]) * 2 + ["conv", "full_attention"],
        "block_multiple_of": 16, "norm_eps": 1e-5}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 2, 2]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT_OSS = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 64,
    },
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW,
    "hidden_size": 64, "intermediate_size": 128,
}

TINY = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
EYES = {  # of the classes that see
    "Gemma3": TINY, "Gemma4": TINY | {"head_dim": 4, "num_key_value_heads": 2},
    "Mistral3": TINY | {"head_dim": 4, "model_type": "pixtral"},
    "Qwen3VL": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": H,
                "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
}
EYES |= dict.fromkeys(("Qwen3OmniMoeThinker", "Qwen3_5"), EYES["Qwen3VL"]) | {
    "Lfm2Vl": TINY, "Qwen2_5_VL": EYES["Qwen3VL"] | {"deepstack_visual_indexes": None}}
EARS = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8,
        "num_mel_bins": 8, "downsample_hidden_size": 8, "output_dim": H}

# name: (transformers' classes, what differs)
VARIANTS = {
    "Phi-4-mini": (
        "Phi3", {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75}, "sliding_window": None,
                 "head_dim": 16, "hidden_size": 64, "original_max_position_embeddings": 256,
                 "tie_word_embeddings": True}),
    "Mistral Small 3": ("Mistral3", {"head_dim": 16, "model_type": "mistral", "sliding_window": None}),
    "Ministral 3": ("Ministral3", {"rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 256}, "head_dim": 16}),
    "Qwen3-VL": ("Qwen3VL", {"head_dim": 12, "rope_parameters": MROPE}),
    "SmolLM3": ("SmolLM3", {}),
    "OLMo 2": ("Olmo2", {}), "OLMo 3": ("Olmo3", OLMO3),
    "Granite 3": ("Granite", GRANITE),
    "Granite 4": ("GraniteMoeHybrid", GRANITE | {
        "num_local_experts": 0, "shared_intermediate_size": 80, "layer_types": ["full_attention"] * LAYERS,
        "position_embedding_type": "rope", "mamba_n_heads": 2, "mamba_n_groups": 1}),
    "Granite 4 H": ("GraniteMoeHybrid", GRANITE | {
        "num_local_experts": 0, "shared_intermediate_size": 80, "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_d_state": 12, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}),
    "GLM-4": ("Glm", {"head_dim": 16, "rope_parameters": PARTIAL}),
    "GLM-4-0414": ("Glm4", {"head_dim": 16, "rope_parameters": PARTIAL, "attention_bias": False}),
    "LFM2": ("Lfm2", LFM2),
    "LFM2 with biases": ("Lfm2", {
        "layer_types": ["conv", "full_attention"] * 4, "block_multiple_of": 16, "conv_bias": True,
        "conv_L_cache": 4}),
    "LFM2-MoE": ("Lfm2Moe", {
        "layer_types": ["conv", "full_attention"] * 4, "norm_eps": 1e-5, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 2,
        "routed_scaling_factor": 1.5}),
    "GLM-4.7-Flash": ("Glm4MoeLite", {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}),
    "Gemma 4 E2B": ("Gemma4Text", GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 4,
                                            "use_double_wide_mlp": True}),
    "Gemma 4 31B": ("Gemma4", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "pad_token_id": 0}),
    "Gemma 4 26B-A4B": ("Gemma4", GEMMA4 | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "pad_token_id": 0, "num_experts": 6,
        "enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "Gemma 2": ("Gemma2", {"head_dim": 20, "sliding_window": WINDOW, "query_pre_attn_scalar": 36,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
}
TARGETS = VARIANTS | {
    "Llama-2": ("Llama", {"num_key_value_heads": 4}),
    "Llama-3": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "Llama-3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama-3.2": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "linear RoPE": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn RoPE with its options": ("Llama", {"rope_parameters": YARN | YARN_OPTIONS}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 20}),
    "Qwen3 tied, yarn": ("Qwen3", {"rope_parameters": YARN, "head_dim": 20, "tie_word_embeddings": True}),
    "Mistral with its window": ("Mistral", {"sliding_window": WINDOW}),
    "Qwen2 with windows": ("Qwen2", {"max_window_layers": 3, **WINDOWS}),
    "Phi-3": ("Phi3", {"sliding_window": WINDOW}),
    "Phi-3 with longrope": (
        "Phi3", {"rope_parameters": LONGROPE, "sliding_window": WINDOW,
                 "original_max_position_embeddings": 256}),
    "Gemma 3": ("Gemma3Text", GEMMA3),
    "Gemma 3 with eyes": ("Gemma3", GEMMA3),
    "LFM2-VL": ("Lfm2Vl", LFM2 | {"model_type": "lfm2"}),
    "Qwen2.5-VL": ("Qwen2_5_VL", {"rope_parameters": MROPE}),
    "Qwen3-Omni": ("Qwen3OmniMoeThinker", {"head_dim": 12, "rope_parameters": MROPE, **EXPERTS}),
    "Mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 20, "norm_topk_prob": True, **EXPERTS}),
    "Qwen3-MoE, not renormalized": ("Qwen3Moe", {"head_dim": 20, "norm_topk_prob": False, **EXPERTS}),
    "gpt-oss": ("GptOss", GPT_OSS), "gpt-oss in MXFP4": ("GptOss", GPT_OSS),
}
DELTA_ROPE = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4}
DELTA = {
    "head_dim": 20, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "rope_parameters": DELTA_ROPE,
}
MIXTURE = DELTA | EXPERTS | {"shared_expert_intermediate_size": 24}
HYBRIDS = {  # with Gated DeltaNet
    "Qwen3.5": ("Qwen3_5Text", DELTA), "Qwen3.5 with eyes": ("Qwen3_5", DELTA),
    "Qwen3.5, yarn": ("Qwen3_5Text", DELTA | {"rope_parameters": DELTA_ROPE | {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "Qwen3.5-MoE": ("Qwen3_5MoeText", MIXTURE), "Qwen3-Next": ("Qwen3Next", MIXTURE),
}
# Sizes that groups of 32 divide.
_WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
_WIDE_DELTA = _WIDE | {"linear_value_head_dim": 16, "linear_num_value_heads": 8}
WIDE = {
    "Qwen3.5": _WIDE_DELTA,
    "Qwen3-Next": _WIDE_DELTA | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "LFM2-MoE": _WIDE | {"moe_intermediate_size": 128},
    "Gemma 4 E2B": _WIDE | {"global_head_dim": 64, "hidden_size_per_layer_input": 32},
    "Gemma 4 26B-A4B": _WIDE | {"global_head_dim": 64, "moe_intermediate_size": 128},
}


def to_mxfp4(folder: Path, reference) -> None:
    """Replace the experts of a gpt-oss file, and of the model, by random ones in MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file = folder / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        count, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        weight = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
        reference.get_parameter(name).data = weight
    save_file(state, file)
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def as_thinker(folder: Path) -> None:
    """Wrap a Qwen3-Omni thinker into the complete model's layout."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    state = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(state | {"talker.model.norm.weight": torch.ones(2)}, file)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": config}))


GLM_MTP = {"fc": "eh_proj.weight", "pre_fc_norm_embedding": "enorm.weight",
           "pre_fc_norm_hidden": "hnorm.weight", "norm": "shared_head.norm.weight"}


def add_mtp_layer(file: Path, prefix: str) -> None:
    """Add a random MTP layer whose attention and MLP have the shapes of a hybrid's fourth layer."""
    g, state, theirs = torch.Generator().manual_seed(1), load_file(file), f"{prefix}layers.3."
    layer = {f"mtp.layers.0.{n.removeprefix(theirs)}": t + 0.05 * torch.randn(t.shape, generator=g)
             for n, t in state.items() if n.startswith(theirs)}
    width = len(layer["mtp.layers.0.input_layernorm.weight"])
    norms = dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (width,))
    layer |= {f"mtp.{n}.weight": 0.2 * torch.randn(shape, generator=g)
              for n, shape in ({"fc": (width, 2 * width)} | norms).items()}
    save_file(state | layer, file, metadata={"format": "pt"})


def make_target(folder: Path, name: str, mtp: bool = False, **other):
    """Write the named model as published; return the transformers model. mtp: with an MTP layer. other:
    sizes.
    """
    transformers = pytest.importorskip("transformers")
    group = HYBRIDS if name in HYBRIDS else TARGETS
    kind, changes = group[name]
    sizes = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, **changes, **other}
    if kind in EYES:
        sizes = {"text_config": sizes, "vision_config": EYES[kind], "tie_word_embeddings": False}
    if kind == "Qwen3_5MoeText":  # whose config has none
        del sizes["intermediate_size"]
    if "Omni" in kind:
        sizes["audio_config"] = EARS
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(sorted(group).index(name))
    make = getattr(transformers, f"{kind}ForConditionalGeneration") if kind in EYES else (
        transformers.AutoModelForCausalLM.from_config)
    reference = make(config).float().eval()
    with torch.no_grad():
        for n, p in reference.state_dict().items():  # norms and biases too: ones and zeros would hide a swap
            one = n.endswith("layer_scalar") or (n.endswith("norm.weight") and "Gemma" not in kind)
            if group is HYBRIDS:  # states decay slowly: a wrong one is to be seen
                one = {"norm.weight": 1, "A_log": -3}.get(n.partition("linear_attn.")[2], 0)
            p.normal_(int(one), 0.2)
    reference.save_pretrained(folder)
    if "Omni" in kind:
        as_thinker(folder)
    if "GLM-4.7" in name:  # published with an MTP layer behind its layers, and copies of two matrices
        add_mtp_layer(file := folder / "model.safetensors", "model.")
        state, mtp = load_file(file), f"model.layers.{reference.config.num_hidden_layers}."
        for theirs, ours in GLM_MTP.items():
            state[mtp + ours] = state.pop(f"mtp.{theirs}.weight")
        state = {n.replace("mtp.layers.0.", mtp): t for n, t in state.items()}
        state |= {f"{mtp}embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
                  f"{mtp}shared_head.head.weight": state["lm_head.weight"].clone()}
        save_file(state, file)
    if "MXFP4" in name:
        to_mxfp4(folder, reference)
    if mtp:
        add_mtp_layer(folder / "model.safetensors", "model." + "language_model." * (kind in EYES))
    return reference


def converted(folder: Path, name: str, dtype: str = "keep", **other) -> tuple[torch.nn.Module, Path]:
    """Return (the transformers model, the converted folder) of a named model; see `make_target`."""
    reference = make_target(folder / "in", name, **other)
    return reference, convert(folder / "in", folder / "out", dtype=dtype, quiet=True)


def top_tokens(reference, prompt: list[int], text: list[int]) -> list[int]:
    """Return the argmax of a transformers model after the prompt and after each token of `text[:-1]`. It
    equals `text` exactly if the model generates `text` greedily.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + text[:-1]])).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()
