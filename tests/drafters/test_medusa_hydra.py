"""Medusa and Hydra: heads as published, converted, draft the trees of the papers' formulas."""
import pytest
import torch
import torch.nn.functional as F
from helpers.decoding import watched
from helpers.heads import layer_shapes, plain_layer, rms, write_head
from torch import Tensor

from checkpoint.convert import convert
from checkpoint.load import load_head
from drafters.medusa import MultiToken
from drafters.static import PathTree
from engine.engine import Engine
from engine.sampling import Sampling

TREE = PathTree(((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1)))
BLOCKS = {"medusa": 3, "medusa, one lm_head": 1, "hydra": 4, "hydra++": 4}  # of each guess, by label
SLOTS = {"hydra": (0, 1, 2, 3), "hydra++": (1, 3, 5, 7)}  # of blocks: dropout takes the others
PREFIX = "prefix_embeding_layer."


def published(target, label: str) -> tuple[dict[str, Tensor], dict]:
    """Tensors and config as FasterDecoding and zankner publish them: one block under all its names, biased
    lm_heads, tables nobody reads, a config that miscounts.
    """
    g, a, tensors = torch.Generator().manual_seed(3), target.args, {}
    H, V, blocks = a.hidden_size, a.vocab_size, BLOCKS[label]

    def add(*names: str, width: int = H, outputs: int = H, bias: bool = True) -> None:
        for leaf, shape in (("weight", (outputs, width)), ("bias", (outputs,)))[: 1 + bias]:
            x = 0.05 * torch.randn(shape, generator=g)
            tensors.update({f"{name}.{leaf}": x.clone() for name in names})

    if label not in SLOTS:
        for k in range(3):
            add(*(f"{k}.{i}.linear" for i in range(blocks)))
            if label == "medusa":
                add(f"{k}.{blocks}", outputs=V, bias=False)
        return tensors, {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "x"}
    for k in range(3):
        first, *rest = (f"hydra_mlp.{k}.{slot}." for slot in SLOTS[label])
        add(f"{first}linear", width=(k + 2) * H)
        add(f"{first}res_connection", width=(k + 2) * H)
        add(*(f"{slot}linear" for slot in rest))
        add(f"hydra_lm_head.{k}{'.1' * (label == 'hydra++')}", outputs=V)
    tensors["input_embed_fn.weight"] = target.embed.weight.clone()
    if label == "hydra++":
        layer = f"{PREFIX}layers.0."
        norms = f"{layer}input_layernorm.weight", f"{PREFIX}norm.weight"
        shapes = layer_shapes(layer, H, a.intermediate_size, (a.num_heads, a.num_kv_heads, a.head_dim))
        for name, shape in (shapes | dict.fromkeys(norms, (H,))).items():
            tensors[name] = 0.05 * torch.randn(shape, generator=g) + ("norm" in name)
        tensors[f"{PREFIX}embed_tokens.weight"] = target.embed.weight.clone()
        tensors[f"{layer}self_attn.rotary_emb.inv_freq"] = torch.ones(a.head_dim // 2)
    return tensors, {"hydra_num_heads": 4, "hydra_head_arch": "prefix-mlp" if label == "hydra++" else "mlp"}


def reference(t: dict[str, Tensor], label: str, target, ids: list[int], theta: float) -> list[int]:
    """The tree's tokens by the papers' formulas, node by node, for a text whose last token is the root."""
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    p, blocks = target.norm(target.causal(torch.tensor([ids[:-1]]))[0])[0], BLOCKS[label]
    if label == "hydra++":
        layer = f"{PREFIX}layers.0."
        read = rms(p, t[f"{layer}input_layernorm.weight"])
        p = plain_layer(lambda name: t.get(layer + name), p, read, target.args.head_dim, theta)
        p = rms(p, t[f"{PREFIX}norm.weight"])
    tokens = {(): ids[-1]}
    for path in TREE.paths:
        k, x = len(path) - 1, p[-1]
        if label in SLOTS:
            first, block = (f"hydra_mlp.{k}.{slot}." for slot in SLOTS[label][:2])
            x = torch.cat([x, *(target.embed.weight[tokens[path[:i]]] for i in range(k + 1))])
            x = linear(x, f"{first}res_connection") + F.silu(linear(x, f"{first}linear"))
            again, lm_head = blocks - 1, f"hydra_lm_head.{k}{'.1' * (label == 'hydra++')}"
        else:
            again, block, lm_head = blocks, f"{k}.0.", f"{k}.{blocks}"
        for _ in range(again):
            x = x + F.silu(linear(x, f"{block}linear"))
        logits = linear(x, lm_head) if f"{lm_head}.weight" in t else target.lm_head_weight @ x
        tokens[path] = int(logits.topk(path[-1] + 1).indices[-1])
    return [tokens[path] for path in ((), *TREE.paths)]


@pytest.mark.parametrize("label", BLOCKS)
def test_trees_are_those_of_the_formulas(golden, models, tmp_path, label):
    """Step after step, so that what the drafter keeps of earlier steps counts too."""
    target, kind = models[0], label.split(",")[0].rstrip("+")
    tensors, config = published(target, label)
    (write_head(tmp_path / "in", tensors, config) / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "in" / f"{kind}_lm_head.pt")
    head = load_head(convert(tmp_path / "in", tmp_path / "ours", golden, quiet=True), target, kind)
    drafter = MultiToken(head, TREE)
    engine = Engine(target, drafter, max_seq_len=200, chunks=(8,), compile=False)
    steps = watched(engine, [256, *range(97, 120)], Sampling(24))
    for text, draft in steps:
        assert draft.tokens == reference(tensors, label, target, text, head.args.rope_base)
    assert len(steps) > 5


def test_vllms_copies(golden, models, tmp_path):
    """They have other names, no biases, and may draft fewer ids."""
    target, ids = models[0], torch.arange(0, 320, 4)
    tensors, config = published(target, "medusa")
    for name in [name for name in tensors if name.endswith("bias")]:
        tensors[name].zero_()
    copies = {"token_map": ids}
    for k in range(3):
        copies[f"lm_heads.{k}.weight"] = tensors[f"{k}.3.weight"][ids].clone()
        copies |= {f"blocks.{k}.layers.{i}.weight": tensors[f"{k}.{i}.linear.weight"] for i in range(3)}
    one, other = (
        load_head(convert(write_head(tmp_path / name, *given), tmp_path / f"{name} ours", golden, quiet=True,
                          dtype="fp32"), target)
        for name, *given in (("theirs", tensors, config), ("vllm", copies, {"model_type": "medusa"}))
    )
    p, path = torch.randn(1, 1, target.args.hidden_size), torch.zeros(1, 1, 2, dtype=torch.int64)
    assert torch.equal(other.draft_ids, ids)
    torch.testing.assert_close(other.head_logits(p, path), one.head_logits(p, path)[..., ids])
