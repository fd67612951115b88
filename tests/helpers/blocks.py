"""Random block heads in published layouts, and a slow reference written from the papers.

The reference reads the published tensors, recomputes the whole sequence at every step, and grows trees level
by level: DFlash arXiv 2602.06036, DDTree 2604.12989, DSpark 2607.05147, P-EAGLE 2602.01469.
"""
from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from families.mixed import causal
from helpers.heads import GEMMA4_LAYER, gemma4_layer, gemma4_shapes, layer_shapes, plain_layer, rms
from model import Transformer

LAYERS, HEADS, KV, HD, INNER = 2, 4, 2, 12, 48
LABELS = (
    "p-eagle", "dflash", "dflash-windows", "dflash-ahead", "jetspec", "dspark", "dspark-gated",
    "dspark-plain", "dspark-gemma4", "dflash2",
)


def published(label: str, target: Transformer, draft: int | None = None):
    """Return (tensors, config) of a random head of one of LABELS, as published.

    draft: draft vocabulary size. Weights are scaled so that predictions are confident and trees deep.
    """
    g, H, V = torch.Generator().manual_seed(0), target.args.hidden_size, target.args.vocab_size
    block, D, is_p_eagle, is_gemma = 5, draft or V, label == "p-eagle", label == "dspark-gemma4"
    shapes = {
        "fc.weight": (H, (3 if is_p_eagle else 2) * H), "norm.weight": (H,), "lm_head.weight": (D, H),
        "layers.0.hidden_norm.weight" if is_p_eagle else "hidden_norm.weight": (H,),
    }
    for i in range(LAYERS):
        p, input_size = f"layers.{i}.", 2 * H if is_p_eagle and i == 0 else H
        shapes |= layer_shapes(p, H, INNER, (HEADS, 1 if is_gemma else KV, HD), input_size) | {
            p + "self_attn.q_norm.weight": (HD,), p + "self_attn.k_norm.weight": (HD,),
            p + "input_layernorm.weight": (H,),
        }
        shapes = gemma4_shapes(shapes, p, H) if is_gemma else shapes
    config = {
        "vocab_size": V, "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "model_type": "qwen3", "num_target_layers": target.args.num_layers,
    }
    block_config = {"mask_token_id": 3, "target_layer_ids": [0, 2]}  # reads outputs of these layers
    if is_p_eagle:
        shapes["mask_hidden"] = (1, 1, 3 * H)
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3, "draft_vocab_size": D,
            "num_draft_steps": block - 1, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
    elif "dspark" not in label:
        if not draft:
            del shapes["lm_head.weight"]
        config |= {"architectures": ["DFlashDraftModel"], "block_size": block, "dflash_config": block_config}
        if label in ("dflash-windows", "dflash-ahead"):
            if label == "dflash-ahead":
                block_config |= {"sliding_window_non_causal": True, "final_logit_softcapping": 20.0}
                shapes["mask_embedding"] = (H,)
            config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
        if label == "dflash2":
            config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False, "sliding_window": 7,
                       "layer_types": ["sliding_attention"] * LAYERS}
            del config["block_size"]
            block_config |= {
                "block_size": block, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6,
                "selector_top_k": 16, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
            shapes |= {f"candidate_selector.{x}_codebook": (V, 6) for x in ("predecessor", "successor")}
            shapes["candidate_selector.hidden_projection.weight"] = (6, H)
            for name in (f"layers.{i}.{x}_conv." for i in range(LAYERS) for x in ("attention", "mlp")):
                shapes[name + "base_kernel"] = 2, 2, H
                shapes[name + "kernel_projection.weight"] = 4 * H // 8, H
        if label == "jetspec":
            block_config["causal"] = True
    else:
        r = 0 if label == "dspark-plain" else 6
        shapes |= {f"markov_head.markov_w{i}.weight": (V, r) for i in (1, 2) if r} | {
            "embed_tokens.weight": (V, H), "confidence_head.proj.weight": (1, H + r),
            "confidence_head.proj.bias": (1,),
        }
        config |= block_config | {
            "architectures": ["Qwen3DSparkModel"], "block_size": block, "markov_rank": r,
            "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": r > 0, "num_anchors": 512,
        }
        if label == "dspark-gated":
            shapes |= {"markov_head.gate_proj.weight": (r, H + r), "markov_head.gate_proj.bias": (r,)}
            config["markov_head_type"] = "gated"
        if is_gemma:
            config |= GEMMA4_LAYER | {"layer_types": ["full_attention"] * LAYERS}
    factors = {"norm.weight": 12.0, "markov_head.markov_w1.weight": 6.0, "confidence_head.proj.weight": 0.02}
    tensors = {
        name: factors.get(name, 1.0) * (("norm" in name) + 0.3 * torch.randn(shape, generator=g))
        for name, shape in shapes.items()
    }
    if "embed_tokens.weight" in tensors:  # DeepSpec's heads have copies of the target's
        tensors["embed_tokens.weight"] = target.embed.weight.clone()
        tensors["lm_head.weight"] = target.output_layer.weight.clone()
    if draft:
        ids = torch.randperm(V, generator=g)[:draft].sort().values
        tensors["d2t"] = ids - torch.arange(draft)
    return tensors, config


class Reference:
    """Reference drafter of a published head, for one sequence."""

    def __init__(self, tensors: dict[str, Tensor], config: dict, target: Transformer):
        self.t, self.target = tensors, target
        self.config = config | config.get("dflash_config", {})
        self.lm_head = tensors.get("lm_head.weight", target.output_layer.weight)
        self.ids = torch.arange(len(self.lm_head)) + tensors.get("d2t", 0)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.t[f"{name}.weight"])

    def layer(self, i: int, x: Tensor, inputs: Tensor, **options) -> Tensor:
        """Run layer i, see `plain_layer`."""
        p = f"layers.{i}."
        if p + "layer_scalar" in self.t:
            return gemma4_layer(lambda n: self.t.get(p + n), x, inputs, **options)
        options["neighbors"] = not self.config.get("rope_is_neox_style", True)  # LiquidAI's
        return plain_layer(lambda n: self.t.get(p + n), x, inputs, HD, self.config["rope_theta"], **options)

    def features(self, ids: list[int], outputs: list[int]) -> Tensor:
        """Return the features of all tokens but the last, concatenated [n, states * H]."""
        return causal(self.target, torch.tensor([ids[:-1]]), tuple(i + 1 for i in outputs))[1][0]

    def rows(self, ids: list[int]) -> Tensor:
        """Return the lm_head's input of each level [levels, H]. ids: all tokens up to the root."""
        return self.norm(self._p_eagle(ids) if "mask_hidden" in self.t else self._block(ids), "norm")

    def _block(self, ids: list[int]) -> Tensor:
        n, size, c = len(ids) - 1, self.config["block_size"], self.config
        context = self.norm(self.features(ids, c["target_layer_ids"]) @ self.t["fc.weight"].T, "hidden_norm")
        x = self.target.embed.weight[[ids[-1]] + [c["mask_token_id"]] * (size - 1)]
        if "mask_embedding" in self.t:
            x[1:] = self.t["mask_embedding"]
        x = x * x.shape[-1] ** 0.5 if "layers.0.layer_scalar" in self.t else x
        distance = torch.arange(n, n + size)[:, None] - torch.arange(n + size)
        looks_ahead = bool(c.get("sliding_window_non_causal")) or c.get("is_causal") is False
        masks = {
            "sliding_attention": ((distance >= 0) | looks_ahead) & (distance < c.get("sliding_window", 0)),
            "full_attention": None if c.get("causal") else distance < n + size,
        }
        default = ["sliding_attention" if "sliding_window" in c else "full_attention"] * LAYERS
        for i, layer_type in enumerate(c.get("layer_types", default)):
            inputs, convolutions = self.norm(x, f"layers.{i}.input_layernorm"), {}
            if "selector_rank" in c:
                inputs, after = self.convolve(f"layers.{i}.attention_conv.", inputs)
                around_mlp = partial(self.convolve, f"layers.{i}.mlp_conv.")
                convolutions = {"after": after, "around_mlp": around_mlp}
            keys, visible = torch.cat((context, inputs)), masks[layer_type]
            x = self.layer(i, x, inputs, keys=keys, visible=visible, **convolutions)
        return x if "DSpark" in c["architectures"][0] else x[1:]

    def convolve(self, name: str, x: Tensor):
        """Return DFlash2's convolution of x [n, H], and a function that computes the next one."""
        base, size = self.t[name + "base_kernel"], self.config["conv_group_size"]
        dynamic = (x @ self.t[name + "kernel_projection.weight"].T).view(len(x), 2, 2, -1)

        def side(number: int, x: Tensor) -> Tensor:
            weights = base[number] + dynamic[:, number].repeat_interleave(size, -1)
            return weights[:, 0] * x + weights[:, 1] * torch.cat((0 * x[:1], x[:-1]))

        return side(0, x), partial(side, 1)

    def _p_eagle(self, ids: list[int]) -> Tensor:
        masks, c = self.config["num_draft_steps"] - 1, self.config
        features = self.features(ids, c["eagle_aux_hidden_state_layer_ids"])
        x = torch.cat((features, self.t["mask_hidden"][0].expand(masks, -1))) @ self.t["fc.weight"].T
        feature = self.norm(x, "layers.0.hidden_norm")
        embedded = self.target.embed.weight[ids[1:] + [c["ptd_token_id"]] * masks]
        for i in range(LAYERS):
            normed = self.norm(x if i else embedded, f"layers.{i}.input_layernorm")
            x = self.layer(i, x, normed if i else torch.cat((normed, feature), -1))
        return x[len(ids) - 2 :]

    def children(self, row: Tensor, previous: int, noise: Tensor | None = None) -> Tensor:
        """Return log-probabilities of the draft ids [Vd] after the token `previous`.

        row [H]: the lm_head's input. noise [V]: Gumbel noise of the position.
        """
        t, c, inputs, confidence = self.t, self.config, row, 0.0
        logits = self.lm_head @ row * c.get("output_multiplier", 1)
        if cap := c.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        if "markov_head.markov_w1.weight" in t:
            e = t["markov_head.markov_w1.weight"][previous]
            inputs, gate = torch.cat((row, e)), t.get("markov_head.gate_proj.weight")
            if gate is not None:
                e = e * (gate @ inputs + t["markov_head.gate_proj.bias"]).sigmoid()
            logits = logits + t["markov_head.markov_w2.weight"] @ e
        if "confidence_head.proj.weight" in t:
            weight, bias = (t[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
            confidence = F.logsigmoid(F.linear(inputs, weight, bias))
        if "selector_rank" in self.config:
            s = "candidate_selector."
            gate = t[s + "predecessor_codebook"][previous] * (t[s + "hidden_projection.weight"] @ row)
            keep = logits.topk(self.config["selector_top_k"]).indices
            logits = torch.full_like(logits, float("-inf")).index_copy(0, keep, (
                logits + t[s + "successor_codebook"] @ gate)[keep])
        if noise is not None:
            logits = logits + noise[self.ids]
        return logits.log_softmax(-1) + confidence

    def tree(self, ids: list[int], nodes: int, noise: Tensor | None = None) -> set[tuple[int, ...]]:
        """Return the nodes - 1 best paths below the root.

        A path never scores above its parent, so nodes - 1 paths per level suffice. noise [levels, V]: the
        target's Gumbel noise of the levels' positions.
        """
        beam, scores = {(): 0.0}, {}
        for level, row in enumerate(self.rows(ids)):
            extended, level_noise = {}, None if noise is None else noise[level]
            for path, path_score in beam.items():
                best = self.children(row, path[-1] if path else ids[-1], level_noise).topk(nodes - 1)
                for score, token in zip(best.values.tolist(), self.ids[best.indices].tolist()):
                    extended[(*path, token)] = path_score + score
            beam = dict(sorted(extended.items(), key=lambda item: -item[1])[: nodes - 1])
            scores |= beam
        return set(sorted(scores, key=scores.get, reverse=True)[: nodes - 1])
