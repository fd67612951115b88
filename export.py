"""Write an EAGLE-3 head of ours as a Hugging Face folder that the EAGLE repository, SGLang and vLLM read."""
from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save

from model import Eagle3Head


def export_eagle3(head: Eagle3Head, folder: str | Path, extra: dict | None = None) -> Path:
    """Save `head` in the SafeAILab/SGLang layout: config.json and model.safetensors in bfloat16, without embedding.

    `d2t` holds offsets (target id = draft id + d2t[draft id]) and `t2d` marks the target ids in the draft vocabulary.
    `extra` keys are added to the config. Each file is written under a temporary name and renamed.
    """
    args, state = head.args, {k: v.detach().to("cpu") for k, v in head.state_dict().items()}
    q, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    tensors = {name: state[name] for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    for part, rows in zip("qkv", state["layer.wqkv.weight"].split((q, kv, kv))):
        tensors[f"midlayer.self_attn.{part}_proj.weight"] = rows
    for part, rows in zip(("gate", "up"), state["layer.mlp.w_gate_up.weight"].chunk(2)):
        tensors[f"midlayer.mlp.{part}_proj.weight"] = rows
    for ours, theirs in (
        ("wo", "self_attn.o_proj"), ("mlp.w_down", "mlp.down_proj"), ("embed_norm", "input_layernorm"),
        ("feature_norm", "hidden_norm"), ("mlp_norm", "post_attention_layernorm"),
    ):
        tensors[f"midlayer.{theirs}.weight"] = state[f"layer.{ours}.weight"]
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    ids = state["draft_ids"]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(args.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)

    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "draft_vocab_size": args.draft_vocab_size,
        "hidden_size": args.hidden_size,
        "target_hidden_size": args.target_hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": args.num_heads,
        "num_key_value_heads": args.num_kv_heads,
        "head_dim": args.head_dim,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_base,
        "max_position_embeddings": args.max_seq_len,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # SGLang's convention: "output of layer id", one less than the layer whose input is captured.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in args.aux_layers], "use_aux_hidden_state": True},
        **(extra or {}),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_file, which makes a file that only its owner can read.
    (folder / "model.safetensors.partial").write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / "config.json.partial").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("model.safetensors", "config.json"):
        os.replace(folder / f"{name}.partial", folder / name)
    return folder
