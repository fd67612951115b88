"""P-EAGLE, DFlash, DSpark, Medusa and Hydra: trees equal the papers' formulas on published tensors."""
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.blocks import LABELS, Reference, published
from helpers.decoding import draft_steps, drafts
from helpers.heads import layer_shapes, plain_layer, rms, write_head
from helpers.states import paths
from torch import Tensor

from checkpoint.convert import convert
from checkpoint.load import load_head
from common.errors import InputError
from drafters.block import block_drafter
from drafters.medusa import MultiToken
from drafters.static import PathTree
from engine.engine import Engine
from engine.sampling import Sampling, gumbel, seed_keys
from families.mixed import causal
from kernels.choose import choose_backend
from tree import TreeShape

PROMPT = [256, *range(97, 120)]
WINDOW = {"sliding_window": 7}


def converted(label: str, golden, target, folder, changes: dict, draft: int | None = None):
    """Return (published tensors, config, converted head)."""
    tensors, config = published(label, target, draft=draft)
    config |= changes
    write_head(folder / "published", tensors, config)
    out = convert(folder / "published", folder / "ours", golden, quiet=True, dtype="fp32")
    return tensors, config, load_head(out, target)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("label,changes,draft", (
    *((label, {}, None) for label in LABELS), ("p-eagle", {}, 90), ("jetspec", WINDOW, None),
    ("dspark", WINDOW | {"rope_is_neox_style": False}, None),
))
def test_trees_equal_the_reference(golden, models, tmp_path, label, changes, draft, temperature):
    """Node for node at every step, so that state from earlier steps is covered too. At temperature 1 each
    level gets the target's noise of its position. With WINDOW all layers have a sliding window.
    """
    target, _ = models
    tensors, config, head = converted(label, golden, target, tmp_path, changes, draft)
    reference, nodes, levels = Reference(tensors, config, target), 12, head.args.drafts
    drafter = block_drafter(head)(head, TreeShape(nodes, levels - 1, nodes - 1))
    engine = Engine(target, drafter, max_seq_len=200, chunks=(8,), compile=False)
    steps, noise, deep = draft_steps(engine, PROMPT, Sampling(16, temperature, seed=7)), None, 0
    for tokens, draft in steps:
        if temperature:
            positions = torch.arange(len(tokens), len(tokens) + levels)[None]
            noise = temperature * gumbel(seed_keys([7]), positions, target.args.vocab_size)[0]
        _, *drafted = paths(draft.tokens, draft.parent)
        assert set(drafted) == reference.tree(tokens, nodes, noise)
        deep += max(map(len, drafted)) > 1
    assert len(steps) > 5 and deep > 1


def test_speculators_layout_loads_the_same_head(golden, models, tmp_path):
    """Its config nests the layers' shape, counts layer inputs instead of outputs, and has a draft vocabulary.
    """
    tensors, config, head = converted("dflash", golden, models[0], tmp_path, {})
    block_config = config.pop("dflash_config")
    speculators = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "draft_vocab_size": 90,
        "aux_hidden_state_layer_ids": [i + 1 for i in block_config["target_layer_ids"]],
        "block_size": config.pop("block_size"), "mask_token_id": block_config["mask_token_id"],
        "sample_from_anchor": False, "transformer_layer_config": config,
    }
    ids = torch.arange(0, 270, 3)
    tensors |= {"lm_head.weight": models[0].output_layer.weight[ids].clone(), "d2t": ids - torch.arange(90)}
    write_head(tmp_path / "speculators", tensors, speculators)
    folder = convert(tmp_path / "speculators", tmp_path / "again", golden, quiet=True, dtype="fp32")
    other = load_head(folder, models[0])
    assert other.args == dataclasses.replace(head.args, draft_vocab_size=90, own_lm_head=True)
    assert torch.equal(other.draft_ids, ids) and torch.equal(other.fc.weight, head.fc.weight)


@pytest.mark.kernels
@pytest.mark.parametrize("label,changes,window", (
    ("p-eagle", {}, 0), ("p-eagle", {}, 12), ("jetspec", WINDOW, 0), ("dspark", WINDOW, 0),
    ("dflash2", {}, 0),
))
def test_drafts_on_the_kernels_equal_those_in_pytorch(golden, models, tmp_path, label, changes, window):
    *_, head = converted(label, golden, models[0], tmp_path, changes)
    if window:
        head.set_sliding_window(window)
    drafter, trees = block_drafter(head)(head, TreeShape(8, 2, 3)), []
    for prepare in (lambda *_: True, choose_backend("cpu").prepare):
        target, own = copy.deepcopy((models[0], drafter))
        own.head.use_target(target)
        assert prepare(target, own.head)
        engine = Engine(target, own, max_seq_len=200, chunks=(8,), compile=False)
        trees.append([draft[:3] for draft in drafts(engine, PROMPT, Sampling(30))])
    assert trees[0] == trees[1] and len(trees[0]) > 5


@pytest.mark.parametrize("label,changes,message", (
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, "last layer"),
    ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, the target has 8"),
    ("dspark", {"markov_head_type": "rnn"}, "'rnn' is not supported"),
    ("p-eagle", {"ptd_token_id": None}, "mask_id"),
))
def test_unsupported_heads_raise_errors(golden, models, tmp_path, label, changes, message):
    with pytest.raises(InputError, match=message) as error:
        converted(label, golden, models[0], tmp_path, changes)
    assert "\n" not in str(error.value) and not (tmp_path / "ours").exists()


# -- Medusa and Hydra: heads as published, converted ---------------------------------------------------------


MEDUSA_TREE = PathTree(((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1)))
BLOCKS = {"medusa": 3, "medusa, one lm_head": 1, "hydra": 4, "hydra++": 4}  # residual blocks of each head
SLOTS = {"hydra": (0, 1, 2, 3), "hydra++": (1, 3, 5, 7)}  # indices of the blocks; the others are dropout
PREFIX = "prefix_embeding_layer."


def published_medusa(target, label: str) -> tuple[dict[str, Tensor], dict]:
    """Return tensors and config as published by FasterDecoding and zankner: one block under all its names,
    lm_heads with biases, unused tables, and a config with a wrong count.
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


def medusa_tokens(t: dict[str, Tensor], label: str, target, ids: list[int], theta: float) -> list[int]:
    """Return the tree's tokens by the papers' formulas, node by node. ids: all tokens up to the root."""
    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    p, blocks = target.norm(causal(target, torch.tensor([ids[:-1]]))[0])[0], BLOCKS[label]
    if label == "hydra++":
        layer = f"{PREFIX}layers.0."
        inputs = rms(p, t[f"{layer}input_layernorm.weight"])
        p = plain_layer(lambda name: t.get(layer + name), p, inputs, target.args.head_dim, theta)
        p = rms(p, t[f"{PREFIX}norm.weight"])
    tokens = {(): ids[-1]}
    for path in MEDUSA_TREE.paths:
        k, x = len(path) - 1, p[-1]
        if label in SLOTS:
            first, block = (f"hydra_mlp.{k}.{slot}." for slot in SLOTS[label][:2])
            x = torch.cat([x, *(target.embed.weight[tokens[path[:i]]] for i in range(k + 1))])
            x = linear(x, f"{first}res_connection") + F.silu(linear(x, f"{first}linear"))
            repeats, lm_head = blocks - 1, f"hydra_lm_head.{k}{'.1' * (label == 'hydra++')}"
        else:
            repeats, block, lm_head = blocks, f"{k}.0.", f"{k}.{blocks}"
        for _ in range(repeats):
            x = x + F.silu(linear(x, f"{block}linear"))
        logits = linear(x, lm_head) if f"{lm_head}.weight" in t else target.output_layer.weight @ x
        tokens[path] = int(logits.topk(path[-1] + 1).indices[-1])
    return [tokens[path] for path in ((), *MEDUSA_TREE.paths)]


@pytest.mark.parametrize("label", BLOCKS)
def test_medusa_trees_equal_the_reference(golden, models, tmp_path, label):
    """At every step, so that state from earlier steps is covered too."""
    target, kind = models[0], label.split(",")[0].rstrip("+")
    tensors, config = published_medusa(target, label)
    (write_head(tmp_path / "in", tensors, config) / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "in" / f"{kind}_lm_head.pt")
    head = load_head(convert(tmp_path / "in", tmp_path / "ours", golden, quiet=True), target, kind)
    drafter = MultiToken(head, MEDUSA_TREE)
    engine = Engine(target, drafter, max_seq_len=200, chunks=(8,), compile=False)
    steps = draft_steps(engine, [256, *range(97, 120)], Sampling(24))
    for tokens, draft in steps:
        assert draft.tokens == medusa_tokens(tensors, label, target, tokens, head.args.rope_base)
    assert len(steps) > 5


def test_vllm_layout_of_medusa_loads_the_same_heads(golden, models, tmp_path):
    """It has other names, no biases, and optionally a draft vocabulary."""
    target, ids = models[0], torch.arange(0, 320, 4)
    tensors, config = published_medusa(target, "medusa")
    for name in [name for name in tensors if name.endswith("bias")]:
        tensors[name].zero_()
    copies = {"token_map": ids}
    for k in range(3):
        copies[f"lm_heads.{k}.weight"] = tensors[f"{k}.3.weight"][ids].clone()
        copies |= {f"blocks.{k}.layers.{i}.weight": tensors[f"{k}.{i}.linear.weight"] for i in range(3)}
    original, vllm = (
        load_head(convert(write_head(tmp_path / name, *source), tmp_path / f"{name} ours", golden, quiet=True,
                          dtype="fp32"), target)
        for name, *source in (("original", tensors, config), ("vllm", copies, {"model_type": "medusa"}))
    )
    p, path = torch.randn(1, 1, target.args.hidden_size), torch.zeros(1, 1, 2, dtype=torch.int64)
    assert torch.equal(vllm.draft_ids, ids)
    torch.testing.assert_close(vllm.head_logits(p, path), original.head_logits(p, path)[..., ids])
