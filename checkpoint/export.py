"""Write a head of ours as a Hugging Face folder that others read.

    python export.py --head checkpoints/smollm2-135m/eagle3 --checkpoint checkpoints/smollm2-135m --layout speculators --out DIR

sglang       EAGLE-3 and EAGLE-1 as the EAGLE repository publishes them; SGLang reads both, vLLM EAGLE-3 (and EAGLE-1 where
             `architectures` in config.json says LlamaForCausalLM instead)
             Medusa heads as vLLM reads them; Hydra heads as their authors publish them
speculators  EAGLE-3 as the speculators library writes it; vLLM reads it
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from checkpoint.folder import read_config
from checkpoint.loading import load_head, load_model
from common.cli import run_command
from common.errors import InputError
from networks.eagle import Eagle1Head
from networks.head import Head, HeadArgs
from networks.medusa import MedusaHeads, MultiTokenHeads

LAYOUTS = ("sglang", "speculators")
# What a folder may hold whose writing was cut off.
PARTS = ("model.safetensors.partial", "config.json.partial")
# What our files say they are, by kind of head. For an EAGLE-1 head vLLM wants "LlamaForCausalLM" there,
# SGLang what we write; the EAGLE repository does not look.
ARCHITECTURES = {
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3Speculator"), "eagle": ("LlamaForCausalLMEagle",),
    "medusa": ("MedusaModel",),
    "hydra": ("HydraModel",),
}


def export(head: Head, folder: str | Path, layout: str = "sglang", target_config: dict | None = None) -> Path:
    """Save `head` as config.json and model.safetensors in bfloat16, without what is the target's.

    target_config: the target's config.json, for the speculators layout, which names the target. Each file is
    written under a temporary name and renamed. Raises InputError if the layout cannot hold this head.
    """
    if isinstance(head, (Eagle1Head, MultiTokenHeads)):
        if layout != "sglang":
            raise InputError("the speculators layout is for EAGLE-3 heads only; write --layout sglang")
        tensors, config = _eagle1(head) if isinstance(head, Eagle1Head) else _guesser(head)
    else:
        tensors = _eagle3(head, "midlayer" if layout == "sglang" else "layers.0")
        config = _sglang_config(head) if layout == "sglang" else _speculators_config(
            head, target_config or {}
        )
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else None).contiguous() for name,
        t in tensors.items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Not save_file, which makes a file that only its owner can read.
    (folder / PARTS[0]).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / PARTS[1]).write_text(json.dumps(config, indent=1) + "\n")
    for part in PARTS:
        os.replace(folder / part, (folder / part).with_suffix(""))
    return folder


def _layer(
    args: HeadArgs, state: dict[str, Tensor], own: str, prefix: str, norms: dict[str, str]
) -> dict[str, Tensor]:
    """The weights of the layer `own` of a state dict, q/k/v and gate/up apart, under the names of a Hugging
    Face LLaMA; they are taken out of `state`.
    """
    q, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    tensors = {}
    for kind in ("weight", "bias"):
        if f"{own}.wqkv.{kind}" in state:
            for part, rows in zip("qkv", state.pop(f"{own}.wqkv.{kind}").split((q, kv, kv))):
                tensors[f"{prefix}.self_attn.{part}_proj.{kind}"] = rows
    for part, rows in zip(("gate", "up"), state.pop(f"{own}.mlp.w_gate_up.weight").chunk(2)):
        tensors[f"{prefix}.mlp.{part}_proj.weight"] = rows
    names = {
        "wo": "self_attn.o_proj", "mlp.w_down": "mlp.down_proj", "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", **norms,
    }
    for ours, theirs in names.items():
        if f"{own}.{ours}.weight" in state:
            tensors[f"{prefix}.{theirs}.weight"] = state.pop(f"{own}.{ours}.weight")
    return tensors


def _eagle(head: Head, prefix: str, norms: dict[str, str]) -> dict[str, Tensor]:
    """The layer and what is beside it."""
    state = head.own_state()
    tensors = _layer(head.args, state, "layer", prefix, norms)
    rest = {"embed.weight": "embed_tokens.weight"} | {
        n: n for n in ("fc.weight", "fc.bias", "norm.weight", "lm_head.weight")
    }
    tensors |= {theirs: state.pop(ours) for ours, theirs in rest.items() if ours in state}
    if left := sorted(state.keys() - {"draft_ids"}):
        raise InputError(
            f"this head has weights that no layout written here has a place for: {', '.join(left)}"
        )
    return tensors


def _eagle1(head: Eagle1Head) -> tuple[dict[str, Tensor], dict]:
    """EAGLE-1/2 (SafeAILab/EAGLE): no norm before the layer or behind it, the target's lm_head."""
    a = head.args
    return _eagle(head, "layers.0", {}), {
        "architectures": [ARCHITECTURES["eagle"][0]], **_llama_config(head), "bias": a.fc_bias,
        "qkv_bias": a.qkv_bias,
    }


def _guesser(head: MultiTokenHeads) -> tuple[dict[str, Tensor], dict]:
    """Medusa heads as vLLM has them, Hydra heads as their authors publish them; see `guess_layouts`."""
    args, state, tensors = head.args, head.own_state(), {}
    medusa = isinstance(head, MedusaHeads)
    for k in range(args.guesses):
        for i in range(args.blocks):
            block = f"stacks.{k}.{min(i, len(head.stacks[k]) - 1)}"
            for leaf in ("weight", "bias"):
                theirs = f"blocks.{k}.layers.{i}" if medusa else f"hydra_mlp.{k}.{i}.linear"
                tensors[f"{theirs}.{leaf}"] = state[f"{block}.linear.{leaf}"].clone()
                if f"{block}.skip.{leaf}" in state:
                    tensors[f"hydra_mlp.{k}.{i}.res_connection.{leaf}"] = state[f"{block}.skip.{leaf}"]
        for leaf in ("weight", "bias"):
            for ours in (f"lm_heads.{k}.{leaf}", f"lm_head.{leaf}"):
                if ours in state:
                    tensors[f"{'lm_heads' if medusa else 'hydra_lm_head'}.{k}.{leaf}"] = state[ours].clone()
    if args.draft_vocab_size < args.vocab_size:
        tensors["token_map"] = head.draft_ids.cpu()
    if not medusa and args.prefix:
        layer = "prefix_embeding_layer.layers.0"
        tensors |= _layer(args, state, "prefix_layer", layer, {"attn_norm": "input_layernorm"})
        tensors["prefix_embeding_layer.norm.weight"] = state["prefix_norm.weight"]
    if medusa:
        config = {
            "model_type": "medusa", "num_heads": args.guesses, "num_hidden_layers": args.blocks,
            "hidden_size": args.hidden_size,
            "vocab_size": args.vocab_size, "truncated_vocab_size": args.draft_vocab_size,
            "medusa_fc_bias": True,
        }
    else:
        config = {
            "hydra_num_heads": args.guesses, "hydra_num_layers": args.blocks,
            "hydra_head_arch": "prefix-mlp" if args.prefix else "mlp",
            "grounded_heads": True, "hidden_state_offset": 0,
        }
    return tensors, {"architectures": [ARCHITECTURES["medusa" if medusa else "hydra"][0]], **config}


def _eagle3(head: Head, prefix: str) -> dict[str, Tensor]:
    """`d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` marks the target ids in the draft
    vocabulary.
    """
    args, ids = head.args, head.draft_ids.cpu()
    tensors = _eagle(head, prefix, {"embed_norm": "input_layernorm", "feature_norm": "hidden_norm"})
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(args.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _llama_config(head: Head) -> dict:
    a = head.args
    return {
        "model_type": "llama", "vocab_size": a.vocab_size, "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers, "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim, "rms_norm_eps": a.norm_eps, "rope_theta": a.rope_base,
        "rope_scaling": a.rope_scaling,
        "max_position_embeddings": a.max_seq_len, "hidden_act": "silu",
        "tie_word_embeddings": a.tie_embeddings,
        "torch_dtype": "bfloat16",
    }


def _sglang_config(head: Head) -> dict:
    a = head.args
    for flag in ("norm_before_residual", "recycle_normed"):
        if getattr(a, flag):
            raise InputError(f"{flag} has no place in the sglang layout; write --layout speculators")
    return {
        "architectures": [ARCHITECTURES["eagle3"][0]], **_llama_config(head),
        "draft_vocab_size": a.draft_vocab_size,
        "target_hidden_size": a.target_hidden_size,
        # SGLang's convention: "output of layer id", one less than the layer whose input is captured.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in a.aux_layers], "use_aux_hidden_state": True
        },
    }


def _speculators_config(head: Head, target: dict) -> dict:
    a = head.args
    return {
        "architectures": [ARCHITECTURES["eagle3"][1]], "speculators_model_type": "eagle3",
        "draft_vocab_size": a.draft_vocab_size,
        "target_hidden_size": a.target_hidden_size, "norm_before_residual": a.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False, "norm_output": a.recycle_normed, "embed_requires_grad": a.own_embedding,
        "eagle_aux_hidden_state_layer_ids": list(a.aux_layers),  # "input of layer id"
        "transformer_layer_config": _llama_config(head),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
                    "accept_tolerance": 0.0
                }
            ],
            "verifier": {"name_or_path": target.get("name"), "architectures": [_verifier(target)]},
        },
        "torch_dtype": "bfloat16",
    }


def _verifier(target: dict) -> str:
    """The target's class in transformers, by what tells the families apart in our config."""
    if target.get("num_experts"):
        return "Qwen3MoeForCausalLM" if target.get("qk_norm") else "MixtralForCausalLM"
    return "Qwen3ForCausalLM" if target.get("qk_norm") else "Qwen2ForCausalLM" if target.get("qkv_bias") else "LlamaForCausalLM"


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 with a one-line error, 130 when interrupted."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--head", required=True, help="converted head")
    p.add_argument("--checkpoint", required=True, help="the converted target it belongs to")
    p.add_argument("--layout", choices=LAYOUTS, default="sglang")
    p.add_argument("--out", required=True)
    p.add_argument("--force", action="store_true", help="replace the weights of an existing folder")
    o = p.parse_args(argv)

    def run() -> None:
        if (Path(o.out) / "model.safetensors").exists() and not o.force:
            raise InputError(
                f"{o.out}: holds a model.safetensors; replace it with --force or choose another --out"
            )
        if "quantization" in read_config(o.head):
            raise InputError(f"{o.head}: quantised; export the head before quantisation")
        target, config = load_model(o.checkpoint)
        print(f"wrote {export(load_head(o.head, target), o.out, o.layout, config)}")

    return run_command(run, OSError)


if __name__ == "__main__":
    sys.exit(main())
