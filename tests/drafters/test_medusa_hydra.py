"""Medusa and Hydra: their formulas, their layouts and their trees."""
import json

import pytest
import torch
import torch.nn.functional as F
from helpers.decoding import watched
from helpers.drafters import guessing_heads
from helpers.heads import layer_shapes
from safetensors.torch import save_file

from checkpoint.convert import convert
from checkpoint.loading import load_head
from drafters.medusa import Hydra, Medusa
from engine.engine import Engine
from networks.medusa import HydraHeads, MedusaHeads
from sampling.options import Sampling
from tree import PathTree

PROMPT = [256, *range(97, 120)]
KINDS = "medusa", "hydra", "hydra++"


def heads_of(target, kind: str, guesses: int = 3, blocks: int = 2, vocabulary: int = 200):
    """Random heads that are not far from the target's own guess."""
    ids = torch.arange(vocabulary) + 20
    head = guessing_heads(target, kind.rstrip("+"), ids, guesses, blocks, kind.endswith("++"), seed=0)
    for p in head.parameters():
        p.requires_grad_(False)
    return head


def drafter_of(head, tree):
    return (Medusa if isinstance(head, MedusaHeads) else Hydra)(head, tree)


def sequential_tree(target, head, ids: list[int], tree: PathTree) -> list[int]:
    """The tree's tokens by the papers' formulas, node by node, for a text whose last token is the root."""
    args = head.args
    state = target.norm(target.causal(torch.tensor([ids[:-1]]))[0])  # z of all committed tokens

    def block(b, x):
        skip = x if b.skip is None else F.linear(x, b.skip.weight, b.skip.bias)
        return skip + F.silu(F.linear(x, b.linear.weight, b.linear.bias))

    tokens = {(): ids[-1]}
    if isinstance(head, HydraHeads) and args.prefix:
        layer, hd, T = head.prefix_layer, args.head_dim, state.shape[1]
        angle = torch.arange(T)[:, None] * head.inv_freq
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)

        def rotated(x):
            return x * cos + torch.cat((-x[..., hd // 2 :], x[..., : hd // 2]), -1) * sin

        widths = args.num_heads * hd, args.num_kv_heads * hd, args.num_kv_heads * hd
        q, k, v = (
            x.view(1, T, -1, hd).transpose(1, 2)
            for x in layer.wqkv(layer.attn_norm(state)).split(widths, -1)
        )
        k, v = (x.repeat_interleave(args.num_heads // args.num_kv_heads, 1) for x in (rotated(k), v))
        out = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True).transpose(1, 2).flatten(2)
        p = head.prefix_norm(layer.finish(state, out))[0, -1]
    else:
        p = state[0, -1]
    for path in tree.paths:
        k = len(path) - 1
        x = p
        if isinstance(head, HydraHeads):
            above = [tokens[path[:i]] for i in range(k + 1)]
            x = torch.cat([p, *(target.embed.weight[t] for t in above)])
        for b in head.stacks[k]:
            x = block(b, x)
        logits = head.lm_head.weight @ x
        tokens[path] = int(head.draft_ids[logits.topk(path[-1] + 1).indices[-1]])
    return [tokens[path] for path in ((), *tree.paths)]


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_those_of_the_formulas(models, kind):
    """Step after step, so that what the drafter keeps of earlier steps counts too."""
    target, _ = models
    head, tree = heads_of(target, kind), PathTree(
        ((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1))
    )
    torch.manual_seed(1)
    for p in head.stacks.parameters():
        p.add_(torch.randn_like(p) * 0.05)
    engine = Engine(target, drafter_of(head, tree), max_seq_len=200, chunks=(8,), compile=False)
    steps = watched(engine, PROMPT, Sampling(24))
    for text, draft in steps:
        assert draft.tokens == sequential_tree(target, head, text, tree)
    assert len(steps) > 5


def published_medusa(target, folder, layers: int, lm_heads: bool) -> dict:
    """As FasterDecoding publish them: one block under all its names, an lm_head each, a config that
    miscounts.
    """
    torch.manual_seed(3)
    H, V, tensors = target.args.hidden_size, target.args.vocab_size, {}
    for k in range(3):
        weight, bias = torch.randn(H, H) * 0.05, torch.randn(H) * 0.05
        for i in range(layers):
            tensors |= {f"{k}.{i}.linear.weight": weight.clone(), f"{k}.{i}.linear.bias": bias.clone()}
        if lm_heads:
            tensors[f"{k}.{layers}.weight"] = torch.randn(V, H) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "x"})
    )
    return tensors


@pytest.mark.parametrize("layers, lm_heads", [(3, True), (1, False)])
def test_medusa_as_published(golden, models, tmp_path, layers, lm_heads):
    target, _ = models
    given = published_medusa(target, tmp_path / "in", layers, lm_heads)
    out = convert(tmp_path / "in", tmp_path / "ours", golden, quiet=True)
    head = load_head(out, target, "medusa")
    args = head.args
    assert (args.guesses, args.blocks, args.repeated, args.lm_head_each) == (3, layers, layers > 1, lm_heads)
    z = torch.randn(2, target.args.hidden_size)
    logits = head.logits(z)
    rows = target.embed.weight if target.lm_head is None else target.lm_head.weight
    for k in range(3):
        x = z
        for _ in range(layers):
            x = x + F.silu(F.linear(x, given[f"{k}.0.linear.weight"], given[f"{k}.0.linear.bias"]))
        wanted = F.linear(x, given[f"{k}.{layers}.weight"] if lm_heads else rows)
        assert torch.allclose(logits[:, k], wanted, atol=1e-5)


def published_hydra(target, folder, prefix: bool) -> dict:
    """As ankner/hydra-vicuna: dropout takes slots, three names for one block, biased lm_heads, tables nobody
    reads.
    """
    torch.manual_seed(4)
    a, tensors = target.args, {}
    H, V, r = a.hidden_size, a.vocab_size, lambda *s: torch.randn(*s) * 0.05
    slots, lm = ((1, 3, 5, 7), "1.") if prefix else ((0, 1, 2, 3), "")
    for k in range(2):
        first = f"hydra_mlp.{k}.{slots[0]}."
        tensors |= {f"{first}linear.weight": r(H, (k + 2) * H), f"{first}linear.bias": r(H)}
        tensors |= {f"{first}res_connection.weight": r(H, (k + 2) * H), f"{first}res_connection.bias": r(H)}
        weight, bias = r(H, H), r(H)
        for slot in slots[1:]:
            tensors |= {
                f"hydra_mlp.{k}.{slot}.linear.weight": weight.clone(),
                f"hydra_mlp.{k}.{slot}.linear.bias": bias.clone()
            }
        tensors |= {f"hydra_lm_head.{k}.{lm}weight": r(V, H), f"hydra_lm_head.{k}.{lm}bias": r(V)}
    tensors["input_embed_fn.weight"] = target.embed.weight.clone()
    if prefix:
        layer, heads = "prefix_embeding_layer.layers.0.", (a.num_heads, a.num_kv_heads, a.head_dim)
        norms = f"{layer}input_layernorm.weight", "prefix_embeding_layer.norm.weight"
        shapes = layer_shapes(layer, H, a.intermediate_size, heads) | dict.fromkeys(norms, (H,))
        tensors |= {name: r(*shape) + ("norm" in name) for name, shape in shapes.items()}
        tensors["prefix_embeding_layer.embed_tokens.weight"] = target.embed.weight.clone()
        tensors[f"{layer}self_attn.rotary_emb.inv_freq"] = torch.ones(a.head_dim // 2)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"hydra_num_heads": 4, "hydra_head_arch": "prefix-mlp" if prefix else "mlp"})
    )
    return tensors


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_as_published(golden, models, tmp_path, prefix):
    target, _ = models
    given = published_hydra(target, tmp_path / "in", prefix)
    head = load_head(convert(tmp_path / "in", tmp_path / "ours", golden, quiet=True), target, "hydra")
    args = head.args
    assert (args.guesses, args.blocks, args.repeated) == (2, 4, True)
    assert args.lm_head_bias and args.prefix == prefix
    p, tokens = torch.randn(1, target.args.hidden_size), torch.tensor([[5, 9]])
    x = torch.cat((p, target.embed.weight[5][None], target.embed.weight[9][None]), -1)
    slots, lm = ((1, 3), "1.") if prefix else ((0, 1), "")
    first, rest = (f"hydra_mlp.1.{slot}." for slot in slots)
    x = F.linear(x, given[f"{first}res_connection.weight"], given[f"{first}res_connection.bias"]) + F.silu(
        F.linear(x, given[f"{first}linear.weight"], given[f"{first}linear.bias"])
    )
    for _ in range(3):
        x = x + F.silu(F.linear(x, given[f"{rest}linear.weight"], given[f"{rest}linear.bias"]))
    wanted = F.linear(x, given[f"hydra_lm_head.1.{lm}weight"], given[f"hydra_lm_head.1.{lm}bias"])
    assert torch.allclose(head.guess_logits(head.output(p, tokens), 1), wanted, atol=1e-5)
