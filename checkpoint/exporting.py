"""A draft head of ours in the layouts that other programs read: see `checkpoint.export`."""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from checkpoint.block_layouts import MARKOV
from checkpoint.names import ARCHITECTURES, CONFIG, WEIGHTS
from checkpoint.published import PUBLISHED
from checkpoint.writer import staging
from common.errors import InputError
from networks.block import BlockHead, DSparkHead
from networks.eagle import Eagle1Head, PEagleHead
from networks.head import Head, HeadArgs
from networks.markov import MarkovArgs
from networks.medusa import MedusaHeads, MultiTokenHeads

INPUT_NORM = {"attn_norm": "input_layernorm"}  # of a layer, under its published name


def export(head: Head, folder: str | Path, layout: str = "sglang", target_config: dict | None = None) -> Path:
    """Save `head` as config.json and model.safetensors in bfloat16 -> the folder.

    Both are replaced at once; other files of the folder stay. The other arguments and errors are those of
    `write_head`. Raises InputError also where there is no space or no permission.
    """
    size = 2 * sum(t.numel() for t in head.own_state().values())
    with staging(Path(folder), size, kept=lambda old: old.name not in (CONFIG, WEIGHTS)) as made:
        write_head(head, made, layout, target_config)
    return Path(folder)


def write_head(head: Head, folder: Path, layout: str, target_config: dict | None) -> None:
    """Write config.json and model.safetensors into a new folder.

    What belongs to the target is left out. target_config: the target's config.json, for the speculators
    layout, which names the target. Raises InputError if the layout cannot hold this head, and OSError.
    """
    if isinstance(head, (Eagle1Head, MultiTokenHeads)):
        if layout != "sglang":
            raise InputError(
                "the speculators layout has no place for EAGLE-1, Medusa and Hydra heads; write --layout"
                " sglang"
            )
        tensors, config = _eagle1(head) if isinstance(head, Eagle1Head) else _multi_token(head)
    elif layout == "sglang":
        first = "layers.0" if isinstance(head, PEagleHead) else "midlayer"
        if isinstance(head, BlockHead):
            tensors, config = _block(head, True)
        else:
            tensors, config = _eagle3(head, first), _sglang_config(head)
    else:
        tensors = _block(head, False)[0] if isinstance(head, BlockHead) else _eagle3(head, "layers.0", True)
        config = _speculators_config(head, target_config or {})
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16 if t.is_floating_point() else None).contiguous()
        for name, t in tensors.items()
    }
    PUBLISHED.require(config, folder / CONFIG)
    folder.mkdir(exist_ok=True)
    # Not save_file, which makes a file that only its owner can read.
    (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def _layer(
    args: HeadArgs, state: dict[str, Tensor], layer: str, prefix: str, norms: dict[str, str]
) -> dict[str, Tensor]:
    """Take the weights of `layer` out of a state dict -> the same under the names of a Hugging Face LLaMA.

    The names begin with `prefix`; q/k/v and gate/up are separated. norms: our name of a further norm -> its
    published name.
    """
    q, kv = args.num_heads * args.head_dim, args.num_kv_heads * args.head_dim
    tensors = {}
    for leaf in ("weight", "bias"):
        if f"{layer}.wqkv.{leaf}" in state:
            for part, rows in zip("qkv", state.pop(f"{layer}.wqkv.{leaf}").split((q, kv, kv))):
                tensors[f"{prefix}.self_attn.{part}_proj.{leaf}"] = rows
    for part, rows in zip(("gate", "up"), state.pop(f"{layer}.mlp.w_gate_up.weight").chunk(2)):
        tensors[f"{prefix}.mlp.{part}_proj.weight"] = rows
    published = {
        "wo": "self_attn.o_proj", "mlp.w_down": "mlp.down_proj", "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", **norms,
    }
    for name, published_name in published.items():
        if f"{layer}.{name}.weight" in state:
            tensors[f"{prefix}.{published_name}.weight"] = state.pop(f"{layer}.{name}.weight")
    return tensors


def _eagle(
    head: Head, prefix: str, norms: dict[str, str], before_fc: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The layer of an EAGLE head and the tensors around it. before_fc: names of norms of what fc reads."""
    state = head.own_state()
    tensors = _layer(head.args, state, "layer", prefix, norms)
    for k in range(1, head.args.num_layers):
        tensors |= _layer(head.args, state, f"more_layers.{k - 1}", f"layers.{k}", INPUT_NORM)
    tensors |= _around(state)
    tensors |= {name: state.pop(f"fc_norms.{j}.weight") for j, name in enumerate(before_fc)}
    if "mask_hidden" in state:
        tensors["mask_hidden"] = state.pop("mask_hidden")[None, None]
    if left := sorted(state.keys() - {"draft_ids"}):
        raise InputError(
            f"this head has weights that no layout written here has a place for: {', '.join(left)}"
        )
    return tensors


def _around(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take what stands beside the layers out of a state dict -> the same under its published names."""
    same = ("fc.weight", "fc.bias", "hidden_norm.weight", "norm.weight", "lm_head.weight")
    names = {"embed.weight": "embed_tokens.weight"} | {name: name for name in same}
    names |= {name: published for name, (published,) in MARKOV.items()}
    return {published: state.pop(name) for name, published in names.items() if name in state}


def _block(head: BlockHead, whole: bool) -> tuple[dict[str, Tensor], dict]:
    """A DFlash or DSpark head as its authors publish it. whole: the target's vocabulary is wanted.

    DSpark's carry copies of the target's embedding and lm_head.
    """
    a, state, tensors = head.args, head.own_state(), {}
    dspark = _kind(head) == "dspark"
    if whole and a.draft_vocab_size < a.vocab_size:
        raise InputError(
            f"the published layout has the target's vocabulary, this head {a.draft_vocab_size} ids of"
            f" {a.vocab_size}; write --layout speculators"
        )
    for i in range(a.num_layers):
        tensors |= _layer(a, state, f"layers.{i}", f"layers.{i}", INPUT_NORM)
    tensors |= _around(state)
    if a.draft_vocab_size < a.vocab_size:
        tensors |= _vocabulary_map(head)
    nested = {"mask_token_id": a.mask_id, "target_layer_ids": [i - 1 for i in a.aux_layers]}
    if a.causal:
        nested["causal"] = True
    if a.from_anchor and not dspark:
        nested["sample_from_anchor"] = True
    config = {"architectures": [ARCHITECTURES[_kind(head)][0]], **_llama_config(head), "model_type": "qwen3"}
    config["block_size"] = a.block
    if not dspark:
        return tensors, config | {"dflash_config": nested}
    lent = {"embed_tokens.weight": head.embed.weight, "lm_head.weight": head.lm_head.weight} if whole else {}
    for name in lent.keys() - tensors.keys():
        if not lent[name].is_floating_point():
            raise InputError(
                f"the published layout holds the target's {name.partition('.')[0]}, and this target is"
                " quantised; name the target before quantisation"
            )
        tensors[name] = lent[name].clone()  # of a tied target both are one tensor
    return tensors, config | nested | _markov_config(a) | {"sample_from_anchor": a.from_anchor}


def _markov_config(a: MarkovArgs) -> dict:
    return {
        "markov_rank": a.markov_rank, "markov_head_type": "gated" if a.markov_gated else "vanilla",
        "enable_confidence_head": a.confidence, "confidence_head_with_markov": a.confidence_reads_markov,
    }


def _kind(head: Head) -> str:
    """One of the keys of ARCHITECTURES, for EAGLE-3 and the heads that draft blocks."""
    if isinstance(head, BlockHead):
        return "dspark" if isinstance(head, DSparkHead) or head.args.markov_rank else "dflash"
    return "p-eagle" if isinstance(head, PEagleHead) else "eagle3"


def _vocabulary_map(head: Head) -> dict[str, Tensor]:
    """`d2t` holds offsets (target id = draft id + d2t[draft id]), `t2d` marks the target ids in the draft
    vocabulary.
    """
    ids = head.draft_ids.cpu()
    marked = torch.zeros(head.args.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def _eagle1(head: Eagle1Head) -> tuple[dict[str, Tensor], dict]:
    """EAGLE-1/2 (SafeAILab/EAGLE): no norm before or after the layer, the target's lm_head."""
    a = head.args
    return _eagle(head, "layers.0", {}), {
        "architectures": [ARCHITECTURES["eagle"][0]], **_llama_config(head), "bias": a.fc_bias,
        "qkv_bias": a.qkv_bias,
    }


def _multi_token(head: MultiTokenHeads) -> tuple[dict[str, Tensor], dict]:
    """Medusa heads in vLLM's layout, Hydra heads in their authors'; see `checkpoint.medusa_layouts`."""
    args, state, tensors = head.args, head.own_state(), {}
    medusa = isinstance(head, MedusaHeads)
    linear = "blocks.{}.layers.{}" if medusa else "hydra_mlp.{}.{}.linear"
    lm_head = "lm_heads" if medusa else "hydra_lm_head"
    for k in range(args.guesses):
        for leaf in ("weight", "bias"):
            for i in range(args.blocks):
                block = f"stacks.{k}.{min(i, len(head.stacks[k]) - 1)}"
                tensors[f"{linear.format(k, i)}.{leaf}"] = state[f"{block}.linear.{leaf}"].clone()
                if f"{block}.skip.{leaf}" in state:
                    tensors[f"hydra_mlp.{k}.{i}.res_connection.{leaf}"] = state[f"{block}.skip.{leaf}"]
            for name in (f"lm_heads.{k}.{leaf}", f"lm_head.{leaf}"):
                if name in state:
                    tensors[f"{lm_head}.{k}.{leaf}"] = state[name].clone()
    if args.draft_vocab_size < args.vocab_size:
        tensors["token_map"] = head.draft_ids.cpu()
    if not medusa and args.prefix:
        layer = "prefix_embeding_layer.layers.0"
        tensors |= _layer(args, state, "prefix_layer", layer, {"attn_norm": "input_layernorm"})
        tensors["prefix_embeding_layer.norm.weight"] = state["prefix_norm.weight"]
    if medusa:
        config = {
            "model_type": "medusa", "num_heads": args.guesses, "num_hidden_layers": args.blocks,
            "hidden_size": args.hidden_size, "vocab_size": args.vocab_size,
            "truncated_vocab_size": args.draft_vocab_size, "medusa_fc_bias": True,
        }
    else:
        config = {
            "hydra_num_heads": args.guesses, "hydra_num_layers": args.blocks,
            "hydra_head_arch": "prefix-mlp" if args.prefix else "mlp",
            "grounded_heads": True, "hidden_state_offset": 0,
        }
    return tensors, {"architectures": [ARCHITECTURES["medusa" if medusa else "hydra"][0]], **config}


def _eagle3(head: Head, prefix: str, speculators: bool = False) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 or P-EAGLE head. speculators: that layout, which has norms before fc."""
    norms = {"embed_norm": "input_layernorm", "feature_norm": "hidden_norm"}
    each = [f"fc_norm.{j}.weight" for j in range(len(head.args.aux_layers))]
    before_fc = {"": [], "all": ["input_norm.weight"], "each": each}[head.args.feature_norm]
    tensors = _eagle(head, prefix, norms, tuple(before_fc) if speculators else ())
    return tensors | _vocabulary_map(head)


def _unusual_layers(a: HeadArgs) -> dict:
    """The layers that a head reads, as DeepSpec names them, if the usual key alone would be misread.

    Whether that one counts inputs or outputs is told by its first id, as if all heads began at layer 2.
    """
    return {} if a.aux_layers[0] == 2 else {"target_layer_ids": [i - 1 for i in a.aux_layers]}


def _llama_config(head: Head) -> dict:
    a = head.args
    return {
        "model_type": "llama", "vocab_size": a.vocab_size, "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size, "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads, "head_dim": a.head_dim,
        "rms_norm_eps": a.norm_eps, "rope_theta": a.rope_base, "rope_scaling": a.rope_scaling,
        "max_position_embeddings": a.max_seq_len, "hidden_act": "silu",
        "tie_word_embeddings": a.tie_embeddings, "torch_dtype": "bfloat16",
    }


def _sglang_config(head: Head) -> dict:
    a = head.args
    for flag in ("norm_before_residual", "recycle_normed"):
        if getattr(a, flag):
            raise InputError(f"{flag} has no place in the sglang layout; write --layout speculators")
    return {
        "architectures": [ARCHITECTURES[_kind(head)][0]], **_llama_config(head), **_p_eagle_config(head),
        "draft_vocab_size": a.draft_vocab_size, "target_hidden_size": a.target_hidden_size,
        # SGLang's convention: "output of layer id", one less than the layer whose input is captured.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in a.aux_layers], "use_aux_hidden_state": True
        },
        **_unusual_layers(a),
    }


def _p_eagle_config(head: Head) -> dict:
    """What the config of a P-EAGLE head has beside that of EAGLE-3; {} of other heads."""
    if not isinstance(head, PEagleHead):
        return {}
    a = head.args
    mask = {"mask_token_id": a.mask_id, "ptd_token_id": a.mask_id, "num_draft_steps": a.drafts}
    return mask | (_markov_config(a) if a.markov_rank or a.confidence else {})


def _speculators_config(head: Head, target: dict) -> dict:
    a = head.args
    proposal = {
        "proposal_type": "greedy", "verifier_accept_k": 1, "accept_tolerance": 0.0,
        "speculative_tokens": min(5, getattr(a, "drafts", 5)),  # a block head drafts no more
    }
    kind = _kind(head)
    algorithm = kind.replace("-", "")
    if isinstance(head, BlockHead):
        own = {
            "aux_hidden_state_layer_ids": list(a.aux_layers),  # "input of layer id"
            "block_size": a.block, "mask_token_id": a.mask_id, "sample_from_anchor": a.from_anchor,
            **({"causal": True} if a.causal else {}), **(_markov_config(a) if kind == "dspark" else {}),
        }
    else:
        own = {
            "norm_before_residual": a.norm_before_residual,
            "norm_before_fc": a.feature_norm == "all", "fc_norm": a.feature_norm == "each",
            "norm_output": a.recycle_normed, "embed_requires_grad": a.own_embedding,
            "eagle_aux_hidden_state_layer_ids": list(a.aux_layers), **_unusual_layers(a),
            **_p_eagle_config(head),
        }
    return {
        "architectures": [ARCHITECTURES[kind][1]], "speculators_model_type": algorithm,
        "draft_vocab_size": a.draft_vocab_size, "target_hidden_size": a.target_hidden_size, **own,
        "transformer_layer_config": _llama_config(head),
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.get("name"), "architectures": [_target_class(target)]},
        },
        "torch_dtype": "bfloat16",
    }


def _target_class(target: dict) -> str:
    """The target's class in transformers, by what tells the families apart in our config."""
    if target.get("num_experts"):
        return "Qwen3MoeForCausalLM" if target.get("qk_norm") else "MixtralForCausalLM"
    if target.get("qk_norm"):
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if target.get("qkv_bias") else "LlamaForCausalLM"
