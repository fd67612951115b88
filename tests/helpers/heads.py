"""Random EAGLE heads in published layouts, and a reference layer."""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.convert import convert
from helpers.families import SIZES, H, V

BASE = SIZES | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 64, "num_hidden_layers": 1}


def layer_shapes(
    prefix: str, hidden: int, inner: int, heads: tuple[int, int, int], input_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by published name, without the norm before attention.

    heads: query heads, key/value heads and head size. input_size: of attention, if not `hidden`.
    """
    (nh, nkv, hd), width = heads, input_size or hidden
    shapes = {
        "self_attn.q_proj": (nh * hd, width), "self_attn.k_proj": (nkv * hd, width),
        "self_attn.v_proj": (nkv * hd, width), "self_attn.o_proj": (hidden, nh * hd),
        "post_attention_layernorm": (hidden,), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def make_head(
    kind: str, draft=40, hidden=H, target=H, hd=12, kv=2, layers=1, first="midlayer.", bias=False,
    qkv_bias=False, qk_norm=False, aux=3, embedding=False, vocab=V, **changes,
) -> tuple[dict, dict]:
    """Return (tensors, config) of a random published head. draft, vocab: draft and target vocabulary sizes.
    hidden, target: hidden sizes of head and target. first: name prefix of an EAGLE-3 head's first layer. aux:
    number of target hidden states it reads. changes: keys of the config.
    """
    g = torch.Generator().manual_seed(7)
    wide = hidden if kind == "eagle" else 2 * hidden
    shapes = {"fc.weight": (hidden, 2 * hidden if kind == "eagle" else aux * target)}
    for k in range(layers):
        p = first if k == 0 and kind == "eagle3" else f"layers.{k}."
        shapes |= layer_shapes(p, hidden, 64, (4, kv, hd), wide if k == 0 else hidden)
        if qkv_bias:
            shapes |= {f"{p}self_attn.{x}_proj.bias": (n * hd,) for x, n in (("q", 4), ("k", kv), ("v", kv))}
        if qk_norm:
            shapes |= {f"{p}self_attn.{x}_norm.weight": (hd,) for x in "qk"}
        if "global_head_dim" in changes:
            shapes = gemma4_shapes(shapes, p, hidden)
        if kind == "eagle3":
            shapes[p + "input_layernorm.weight"] = (hidden,)
            if k == 0:
                shapes[p + "hidden_norm.weight"] = (hidden,)
    if kind == "eagle3":
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft, hidden)}
    if bias:
        shapes["fc.bias"] = (hidden,)
    if embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    state = {
        name: (1 if name.endswith("norm.weight") else 0) + 0.2 * torch.randn(shape, generator=g)
        for name, shape in shapes.items()
    }
    if kind == "eagle3" and draft != vocab:
        ids = torch.randperm(vocab, generator=g)[:draft].sort().values
        state["d2t"] = ids - torch.arange(draft)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    config = BASE | {"hidden_size": hidden, "num_key_value_heads": kv, "num_hidden_layers": layers} | changes
    if kind == "eagle3":
        config.setdefault("draft_vocab_size", draft)
    return state, config


def write_head(folder: Path, state: dict, config: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    own = {n: t.contiguous() for n, t in state.items() if n != "mask_embedding"}
    save_file(own, folder / "model.safetensors")
    if "mask_embedding" in state:
        torch.save(state["mask_embedding"], folder / "mask_embedding.pt")
    return folder


def add_heads(work: Path, target: Path, width: int, **changes) -> list[Path]:
    """Convert random EAGLE-3 and EAGLE-1 heads for a converted target of this width; return their folders."""
    heads = {kind: make_head(kind, hidden=width, target=width, **changes) for kind in ("eagle3", "eagle")}
    return [convert(write_head(work / kind, *x), target=target, quiet=True) for kind, x in heads.items()]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm, the reference."""
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def rotated(
    x: Tensor, positions: Tensor, theta: float, pairs: int | None = None, neighbors: bool = False
) -> Tensor:
    """Apply RoPE to x [n, heads, hd] at these positions [n]. pairs: number of rotated pairs; default: all.

    neighbors: channels 2j and 2j + 1 are a pair; the result is in another order, the same for q and k.
    """
    half = x.shape[-1] // 2
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if neighbors else x
    frequencies = theta ** (-torch.arange(half) / half) * (torch.arange(half) < (pairs or half))
    angle = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
    return x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angle.sin()


def plain_layer(
    get: Callable[[str], Tensor | None], residual: Tensor, inputs: Tensor, hd: int, theta: float = 1e4,
    keys: Tensor | None = None, visible: Tensor | None = None, after=lambda x: x,
    around_mlp=lambda m: (m, lambda x: x), activation=F.silu, pairs: int | None = None,
    neighbors: bool = False,
) -> Tensor:
    """Run one layer as in the papers. get(name): a published tensor, or None if there is none.

    inputs [n, ...]: the normed input. keys [m, ...]: all rows to attend to; the last n are `inputs`; default:
    `inputs`. visible [n, m] bool: the mask, default causal. after: applied to attention's output.
    around_mlp(normed input): returns the MLP's input, and a function applied to its output. pairs, neighbors:
    see `rotated`.
    """
    keys = inputs if keys is None else keys
    positions = torch.arange(len(keys))
    own = positions[-len(inputs) :]
    visible = positions <= own[:, None] if visible is None else visible

    def heads(x: Tensor, part: str) -> Tensor:
        x = F.linear(x, get(f"self_attn.{part}_proj.weight"), get(f"self_attn.{part}_proj.bias"))
        x, norm = x.view(len(x), -1, hd), get(f"self_attn.{part}_norm.weight")
        return x if norm is None else rms(x, norm)

    q = rotated(heads(inputs, "q"), own, theta, pairs, neighbors)
    k, v = rotated(heads(keys, "k"), positions, theta, pairs, neighbors), heads(keys, "v")
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / hd**0.5
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v).flatten(1)
    x = residual + after(out @ get("self_attn.o_proj.weight").T)
    m, after_mlp = around_mlp(rms(x, get("post_attention_layernorm.weight")))
    gate, up = m @ get("mlp.gate_proj.weight").T, m @ get("mlp.up_proj.weight").T
    return x + after_mlp((activation(gate) * up) @ get("mlp.down_proj.weight").T)


GEMMA4_LAYER = {  # heads of 12 channels with 3 rotated pairs, values from the key projection
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 12,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "final_logit_softcapping": 20.0, "use_bidirectional_attention": "vision", "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 7,
    "rope_parameters": {
        "rope_theta": None, "rope_type": "default",
        "full_attention": {
            "partial_rotary_factor": 0.5, "rope_theta": 5000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}
GEMMA4_NORMS = "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"


def gemma4_shapes(shapes: dict[str, tuple[int, ...]], prefix: str, hidden: int) -> dict:
    """Return the shapes of a layer's tensors with those that only Gemma 4 has, without those it lacks."""
    return {name: shape for name, shape in shapes.items() if not name.endswith("v_proj.weight")} | {
        f"{prefix}{norm}.weight": (hidden,) for norm in GEMMA4_NORMS} | {f"{prefix}layer_scalar": (1,)}


def gemma4_layer(get: Callable[[str], Tensor | None], residual: Tensor, inputs: Tensor, **more) -> Tensor:
    """Run a layer of `GEMMA4_LAYER`, see `plain_layer`: values are normed and scores are not scaled."""
    renamed = {"post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
               "self_attn.v_proj.weight": "self_attn.k_proj.weight"}
    fixed = {"self_attn.q_norm.weight": get("self_attn.q_norm.weight") * 12**0.5,
             "self_attn.v_norm.weight": torch.ones(12)}
    after, after_mlp = (lambda x, n=n: rms(x, get(f"{n}.weight")) for n in GEMMA4_NORMS[::2])
    gelu = partial(F.gelu, approximate="tanh")
    return get("layer_scalar") * plain_layer(
        lambda name: fixed[name] if name in fixed else get(renamed.get(name, name)), residual, inputs, 12,
        5000.0, after=after, around_mlp=lambda m: (m, after_mlp), pairs=3, activation=gelu, **more)
