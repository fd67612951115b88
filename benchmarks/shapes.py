"""Models of published shapes with random weights, for timing."""
from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from checkpoint.eagle_layouts import eagle3_aux_layers
from checkpoint.load import class_of
from common.errors import InputError
from families.experts import MixtureArgs
from families.gpt_oss import GptOssArgs
from families.hybrid import HybridArgs
from head import Eagle3Head, Head, HeadArgs
from kernels.quantized import MXFP4
from kernels.scheme import INT4_MODES, LM_HEAD_MODES, Scheme, replace_linears
from model import ModelArgs, Transformer, meta_modules

INT4_GROUP = 64
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Name -> (target, vocabulary and MLP width of its EAGLE-3 head).
SHAPES = {
    "llama-3.1-8b": (
        ModelArgs(128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, LLAMA3, max_seq_len=131072), 32000, 14336
    ),
    "llama-3.2-1b": (
        ModelArgs(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, {**LLAMA3, "factor": 32.0}, True, 131072),
        32000, 8192,
    ),
    "smollm2-135m": (ModelArgs(49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, None, True, 8192), 8192, 1536),
    "qwen3-30b-a3b": (
        MixtureArgs(
            151936, 2048, 768, 48, 32, 4, 128, 1e-6, 1e6, max_seq_len=40960, qk_norm=True, num_experts=128,
            experts_per_token=8,
        ), 32000, 6144,
    ),
    "gpt-oss-20b": (
        GptOssArgs(
            201088, 2880, 2880, 24, 64, 8, 64, 1e-5, 1.5e5, YARN, max_seq_len=131072, qkv_bias=True,
            num_experts=32, experts_per_token=4, windows=(128, 0) * 12, sinks=True, biases=True,
            activation="clamped_swiglu",
        ), 32000, 17280
    ),
    "qwen3.5-27b": (
        HybridArgs(
            248320, 5120, 17408, 64, 24, 4, 256, 1e-6, 1e7, max_seq_len=262144, qk_norm=True, rotary_dim=64,
            delta_layers=(1, 1, 1, 0) * 16, delta_heads=48, delta_key_heads=16, delta_key_dim=128,
            delta_value_dim=128, delta_taps=4,
        ), 32000, 17408
    ),
    "tiny-mixture": (
        MixtureArgs(512, 64, 128, 4, 4, 2, 16, max_seq_len=4096, num_experts=6, experts_per_token=2), 256, 128
    ),
    "tiny": (ModelArgs(512, 64, 128, 4, 4, 2, 16, max_seq_len=4096), 256, 128),
}


def shape_of(name: str) -> tuple[ModelArgs, int, int]:
    """Return an entry of `SHAPES`; NAME/N is truncated to N layers. Raise InputError on an unknown name."""
    name, _, layers = name.partition("/")
    if name not in SHAPES or not (layers or "1").isdigit():
        raise InputError(f"--shape {name}: unknown; choose from {', '.join(SHAPES)}, or NAME/LAYERS")
    args, *head_sizes = SHAPES[name]
    count = int(layers or args.num_layers)
    layer_fields = {"delta_layers": args.delta_layers[:count]} if isinstance(args, HybridArgs) else {}
    return replace(args, num_layers=count, **layer_fields), *head_sizes


def random_models(
    name: str, dtype: torch.dtype, device: str, mode: str | None, group: int = INT4_GROUP
) -> tuple[Transformer, Head]:
    """Return a target of this shape and its EAGLE-3 head.

    mode: one of `kernels.scheme.MODES` for quantized weights, mxfp4 for experts, or None. In int4 and w4a8
    `group` inputs share a scale, and lm_head and head are 8-bit. Raise InputError on an unknown name.
    """
    args, draft_vocab, mlp_width = shape_of(name)
    head_args = HeadArgs(
        args.vocab_size, args.hidden_size, mlp_width, 1, args.num_heads, args.num_kv_heads, args.head_dim,
        args.norm_eps, 1e4, max_seq_len=args.max_seq_len, draft_vocab_size=draft_vocab,
        target_hidden_size=args.hidden_size,
        aux_layers=eagle3_aux_layers(args.num_layers) if args.num_layers > 5 else (0, 2, args.num_layers),
    )
    target_scheme = head_scheme = None
    if mode:
        args, lm_head_mode = replace(args, tie_embeddings=False), LM_HEAD_MODES.get(mode, mode)
        target_scheme = (
            Scheme(lm_head_mode, 0, lm_head_mode, MXFP4) if mode == MXFP4
            else Scheme(mode, group if mode in INT4_MODES else 0, lm_head_mode)
        )
        head_scheme = Scheme(lm_head_mode, 0, lm_head_mode)
    target = _random(class_of({"kind": "target", **asdict(args)}), args, target_scheme, dtype, device)
    head = _random(Eagle3Head, head_args, head_scheme, dtype, device)
    head.draft_ids = torch.arange(draft_vocab, device=device)
    head.use_target(target)
    return target, head


def _random(
    model_class: type[nn.Module], args, scheme: Scheme | None, dtype: torch.dtype, device: str
) -> nn.Module:
    with meta_modules():
        model = model_class(args)
        if scheme:
            replace_linears(model, scheme.with_kinds(model))
    for key, p in model.named_parameters():
        if p.dtype == torch.float32 and not key.endswith(".scale"):
            p.data = p.data.to(dtype)
    model.to_empty(device=device).requires_grad_(False)
    for key, p in model.named_parameters():
        if key.endswith("norm.weight"):
            p.fill_(1.0)
        elif key.endswith(".scale"):  # weights have a standard deviation of about 0.02
            p.fill_({torch.bfloat16: 2.0**-8, torch.uint8: 127 - 7}.get(p.dtype, 2.0**-12))
        elif p.dtype in (torch.int8, torch.uint8):
            p.random_(*(0, 256) if p.dtype == torch.uint8 else (-127, 128))
        else:
            p.copy_(torch.randn_like(p, dtype=torch.float32) * (0.02 if p.dtype.itemsize > 1 else 80))
    model.inv_freq = args.inverse_frequencies().to(device)
    return model.eval()


def describe(writer, a: ModelArgs, file_type: int) -> None:
    """Write the GGUF metadata of a shape. file_type: a `gguf.LlamaFileType`."""
    import gguf

    experts = getattr(a, "num_experts", 0)
    for add, value in (
        (writer.add_block_count, a.num_layers), (writer.add_context_length, a.max_seq_len),
        (writer.add_embedding_length, a.hidden_size), (writer.add_feed_forward_length, a.intermediate_size),
        (writer.add_head_count, a.num_heads), (writer.add_head_count_kv, a.num_kv_heads),
        (writer.add_key_length, a.head_dim), (writer.add_value_length, a.head_dim),
        (writer.add_rope_dimension_count, a.head_dim), (writer.add_layer_norm_rms_eps, a.norm_eps),
        (writer.add_rope_freq_base, a.rope_base), (writer.add_vocab_size, a.vocab_size),
        (writer.add_tokenizer_model, "none"), (writer.add_file_type, file_type),
        (writer.add_quantization_version, gguf.GGML_QUANT_VERSION), (writer.add_expert_count, experts),
        (writer.add_expert_used_count, getattr(a, "experts_per_token", 0)),
        (writer.add_expert_feed_forward_length, a.intermediate_size if experts else 0),
    ):
        add(value)
    if isinstance(a, GptOssArgs):
        writer.add_sliding_window(max(a.windows))
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(a.rope_scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(a.rope_scaling["original_max_position_embeddings"])


def write_gguf(name: str, out: Path) -> None:
    """Write random weights of a LLaMA, Qwen3-MoE or gpt-oss shape for llama-bench.

    Weights are Q4_0; embedding and lm_head are Q6_K if the hidden size is a multiple of its block of 256.
    gpt-oss has MXFP4 experts, the rest is Q8_0, as published.
    """
    import gguf
    import numpy as np

    a = shape_of(name)[0]
    experts = getattr(a, "num_experts", 0)
    gpt_oss, types, files = isinstance(a, GptOssArgs), gguf.GGMLQuantizationType, gguf.LlamaFileType
    family, file_type, expert_type, embedding_type, weight_type = (
        ("gpt-oss", files.MOSTLY_MXFP4_MOE, types.MXFP4, types.Q8_0, types.Q8_0) if gpt_oss else
        ("qwen3moe" if experts else "llama", files.MOSTLY_Q4_0, types.Q4_0,
         types.Q4_0 if a.hidden_size % 256 else types.Q6_K, types.Q4_0)
    )
    writer = gguf.GGUFWriter(out, family, use_temp_file=True)
    describe(writer, a, file_type)
    q, kv, width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.hidden_size
    rng = np.random.default_rng(0)

    def add_matrix(key: str, *shape: int, tensor_type=weight_type) -> None:
        block, size = gguf.GGML_QUANT_SIZES[tensor_type]
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
        if tensor_type == types.MXFP4:
            data[..., 0] = 127 - 7
        else:
            scale = slice(size - 2, size) if tensor_type == types.Q6_K else slice(0, 2)
            data[..., scale] = np.frombuffer(np.float16(2.0**-8).tobytes(), np.uint8)
        writer.add_tensor(f"{key}.weight", data.reshape(*shape[:-1], -1), raw_dtype=tensor_type)
        if gpt_oss and key.startswith("blk."):
            writer.add_tensor(f"{key}.bias", np.zeros(shape[:-1], np.float32))

    def add_norm(key: str, width: int = width) -> None:
        writer.add_tensor(f"{key}.weight", np.ones(width, np.float32))

    for key in ("token_embd", "output"):
        add_matrix(key, a.vocab_size, width, tensor_type=embedding_type)
    add_norm("output_norm")
    for i in range(a.num_layers):
        suffix, stack = ("_exps", (experts,)) if experts else ("", ())
        for key, *shape in (
            ("attn_q", q, width), ("attn_k", kv, width), ("attn_v", kv, width), ("attn_output", width, q),
            (f"ffn_gate{suffix}", *stack, a.intermediate_size, width),
            (f"ffn_up{suffix}", *stack, a.intermediate_size, width),
            (f"ffn_down{suffix}", *stack, width, a.intermediate_size),
        ):
            add_matrix(f"blk.{i}.{key}", *shape, tensor_type=expert_type if "_exps" in key else weight_type)
        for key in ("attn_norm", "post_attention_norm" if gpt_oss else "ffn_norm"):
            add_norm(f"blk.{i}.{key}")
        if a.qk_norm:
            for key in ("attn_q_norm", "attn_k_norm"):
                add_norm(f"blk.{i}.{key}", a.head_dim)
        if experts:
            router = rng.normal(0, 0.02, (experts, width)).astype(np.float32)
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        if gpt_oss:
            writer.add_tensor(f"blk.{i}.attn_sinks.weight", np.zeros(a.num_heads, np.float32))
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.bias", np.zeros(experts, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
