"""Losses against their definitions, on heads that draft with KV caches; the training loop."""
import dataclasses
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.training import ROWS, loss_on, perturb_weights

from checkpoint.load import load_model
from common.errors import InputError
from families.mixed import causal
from kernels import isa
from model import KVCache
from networks.p_eagle import PEagleHead
from networks.weights import copy_head, own_state
from training.batches import batches
from training.features import Features, training_copy
from training.heads import TRAINED, HeadShape, new_head
from training.losses import STEP_DECAY, TOKEN_LOSS_WEIGHT, DraftLoss
from training.processes import ProcessGroup
from training.trainer import STATE, Plan, Trainer, save_state


def test_blockwise_loss_equals_its_definition():
    """Loss, and gradients by the lm_head's input and weight, with more rows than one block."""
    g = torch.Generator().manual_seed(3)
    x, head = torch.randn(300, 8, generator=g), torch.randn(30, 8, generator=g)
    teacher, index = torch.randn(50, 30, generator=g), torch.randint(0, 50, (300,), generator=g)
    weight = torch.rand(300, generator=g)
    x.requires_grad_(True), head.requires_grad_(True)
    loss, acceptance, correct = DraftLoss.apply(x, head, teacher, index, weight, 0.7)
    gradients = torch.autograd.grad(loss, (x, head))
    logits, p = x @ head.T, teacher[index].softmax(-1)
    q = logits.softmax(-1)
    ce, lk = -(p * q.log()).sum(-1), -torch.minimum(p, q).sum(-1).log()
    expected = ((0.3 * ce + 0.7 * lk) * weight).sum()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(correct, (logits.argmax(-1) == p.argmax(-1)).float()) and correct.any()
    torch.testing.assert_close(acceptance, torch.minimum(p, q).sum(-1).detach())
    for a, b in zip(gradients, torch.autograd.grad(expected, (x, head))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def chain(head, features, ids: list[int], j: int, steps: int):
    """Yield the lm_head's inputs [H] at each step of a chain from position j, drafted with caches."""
    caches, positions = [KVCache(1, 64, head.args, torch.float32, "cpu")], torch.arange(j + 1)[None]
    tokens, h = torch.tensor([ids[1 : j + 2]]), head.fuse(features[None, : j + 1])
    for step in range(steps):
        visible = torch.arange(64) <= positions[..., None]
        h = head(tokens, h, positions, positions, visible, caches)[:, -1:]
        yield h[0, 0]
        positions, tokens = torch.tensor([[j + step + 1]]), torch.tensor([[ids[j + step + 2]]])


def block(head, features, ids: list[int], j: int):
    """Return the lm_head's inputs in a block after position j [K, H], drafted with caches."""
    n, args, slots = j + 1, head.args, torch.arange(64)
    caches, context = head.caches(1, 64, torch.float32, "cpu"), head.fuse(features[None, :n])
    if isinstance(head, PEagleHead):
        at = torch.arange(n + args.drafts - 1)[None]  # positions and slots
        hidden = head.fuse(head.mask_hidden[None, None]).expand(1, args.drafts - 1, -1)
        tokens = torch.tensor([ids[1 : j + 2] + [args.mask_id] * (args.drafts - 1)])
        h = head(tokens, torch.cat((context, hidden), 1), at, at, slots <= at[..., None], caches)
        return head.rows(h)[0, -args.drafts :]
    at = torch.arange(n + args.block)[None]
    last = torch.where(at < n, at, at if args.causal else n + args.block - 1)
    visible, causal = (slots <= x[..., None] for x in (last, at))
    return head(torch.tensor([ids[j + 1]]), context, at, at, visible, caches, causal=causal)[0]


def drafted(head, features, row: dict, steps: int):
    """Yield (draft step, position j, input of the lm_head) of every prediction."""
    for begin, end in row["answers"]:
        for j in range(begin - 1, end - 2):
            outputs = block(head, features, row["ids"], j) if head.args.drafts else chain(
                head, features, row["ids"], j, steps)
            for step, h in zip(range(end - 2 - j), outputs):
                yield step, j, h


SHAPES = {  # of new block heads; "dflash+causal" is JetSpec
    "p-eagle": HeadShape(num_layers=2, drafts=3, mask_id=7),
    "dflash": HeadShape(num_layers=2, drafts=3, states=2),
    "dspark": HeadShape(drafts=4, markov_rank=6, states=2),
    "p-eagle+markov": HeadShape(drafts=3, markov_rank=6),
    "dflash+causal": HeadShape(num_layers=2, drafts=3, states=2),
    "dflash+window": HeadShape(num_layers=2, drafts=3, states=2),
}


@pytest.mark.parametrize("name", ("eagle", "eagle3", "eagle3+window", *SHAPES))
def test_losses_equal_their_definition_on_drafted_outputs(models, models1, name):
    """At all positions: cross-entropy, EAGLE-1's regression, the Markov head's terms and the confidence loss.

    All weights of a block head get gradients, except those shared with the target.
    """
    kind, _, variant = name.partition("+")
    target, head = models1 if kind == "eagle" else models
    if name in SHAPES:
        head = perturb_weights(new_head(target, kind, torch.arange(0, 320, 2), SHAPES[name], 0))
        head.args = replace(head.args, causal=True) if variant == "causal" else head.args
    else:
        head = copy_head(head, target, torch.float32)
    (head.layers[0] if kind in ("dflash", "dspark") else head.layer).window = 3 * (variant == "window")
    args, ids, lk = head.args, head.draft_ids, 0.7 * (name in SHAPES)
    objective = TRAINED[kind].objective(target, head, 4, lk=lk)
    steps = objective.steps
    losses = [torch.zeros(()) for _ in range(steps)]
    correct, valid, scored = [0] * steps, [0] * steps, [0] * steps
    with torch.no_grad():
        loss, hits, batch, states = loss_on(objective)
        for state, row in zip(states.normed, ROWS):
            teacher = F.linear(state, target.lm_head.weight[ids]).softmax(-1)
            features = causal(target, torch.tensor([row["ids"]]), args.aux_layers)[1][0]
            for i, j, h in drafted(head, features, row, steps):
                valid[i] += 1
                if row["ids"][j + 2 + i] not in ids:
                    continue
                scored[i] += 1
                previous, logits, p = torch.tensor(row["ids"][j + 1 + i]), head.logits(h), teacher[j + 1 + i]
                if getattr(args, "markov_rank", 0):
                    logits = logits + head.markov_logits(h, previous)
                correct[i] += int(logits.argmax() == p.argmax())
                entropy = -(p * logits.log_softmax(-1)).sum()
                accepted = torch.minimum(p, logits.softmax(-1)).sum()
                losses[i] = losses[i] + (1 - lk) * entropy - lk * accepted.log()
                if kind == "eagle":
                    regression = F.smooth_l1_loss(h, state[j + 1])
                    losses[i] = losses[i] + regression - (1 - TOKEN_LOSS_WEIGHT) * entropy
                if getattr(args, "confidence", False):
                    confidence = head.confidence_logit(h, previous)
                    losses[i] = losses[i] + F.binary_cross_entropy_with_logits(confidence, accepted)
    expected = sum(STEP_DECAY**i * total / n for i, (total, n) in enumerate(zip(losses, scored)))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert batch.scored == scored and hits.tolist() == correct and batch.valid == valid
    # Both answers of the last row, and no position between them.
    assert valid[0] == 8 + 6 + 2 + 5 + 8 and 0 < scored[0] <= valid[0]
    if name in SHAPES:
        loss_on(objective)[0].backward()
        own = {name: p for name, p in head.named_parameters() if p.requires_grad}
        assert not [name for name, p in own.items() if p.grad is None or not p.grad.any()]
        assert target.embed.weight.grad is None


# -- the target's states, in the dtype that is faster on this CPU --------------------------------------------


@pytest.mark.parametrize("fast_bf16", (False, True))
def test_a_bfloat16_target_computes_states_in_the_faster_dtype(golden, monkeypatch, fast_bf16):
    """In float32 where bfloat16 products are slower."""
    features = {"avx512_bf16", "amx_bf16"} if fast_bf16 else {"avx512_bf16"}
    monkeypatch.setattr(isa, "features", lambda: features)
    monkeypatch.setattr(isa, "vendor", lambda: isa.INTEL)
    target, _ = load_model(golden, dtype=torch.bfloat16)
    states = Features(training_copy(target), (1, 2, 3), dtype=torch.bfloat16)
    assert states.compute([1, 2, 3]).normed.dtype == target.embed.dtype == torch.bfloat16
    assert states.read(ROWS[:1]).features.dtype == (torch.bfloat16 if fast_bf16 else torch.float32)


# -- batches and gradients -----------------------------------------------------------------------------------


def trainer(target, tmp_path, kind: str = "eagle3", rank: int = 0, count: int = 1, **plan) -> Trainer:
    """Return the trainer of one of `count` ranks, without communication."""
    shape = HeadShape(drafts=3 if kind == "p-eagle" else None)
    objective = TRAINED[kind].objective(target, new_head(target, kind, torch.arange(320), shape, 0), 3)
    plan, processes = Plan(epochs=1, batch_tokens=64, **plan), ProcessGroup(rank, count)
    processes.all_reduce = lambda tensors: None
    features = Features(target, objective.aux_layers)
    return Trainer(objective, features, ROWS, ROWS, plan, tmp_path, processes=processes)


def test_batches_hold_every_row_once():
    rows = [{"ids": [0] * n} for n in (5, 300, 7, 9, 100, 2)]
    for rng in (None, torch.Generator().manual_seed(0)):
        groups = batches(rows, 110, rng)
        assert sorted(i for group in groups for i in group) == list(range(6))
        assert all(len(g) == 1 or len(g) * max(len(rows[i]["ids"]) for i in g) <= 110 for g in groups)


@pytest.mark.parametrize("kind", ("eagle3", "eagle", "p-eagle"))
def test_gradients_do_not_depend_on_how_a_batch_is_split(models, tmp_path, monkeypatch, kind):
    """Across processes, and within each; random chains and noise are covered too."""
    whole = trainer(models[0], tmp_path, kind)
    steps = whole.objective.steps
    loss, accuracy = whole.gradients([0, 1, 2, 3], steps)
    monkeypatch.setattr("training.trainer.MICRO_BATCH_TOKENS", 25)
    parts = [trainer(models[0], tmp_path, kind, rank, 2) for rank in (0, 1)]
    losses, accuracies = zip(*(part.gradients([0, 1, 2, 3], steps) for part in parts))
    assert len(parts[1].micro_batches([0, 1, 2, 3])) > 1
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    assert [sum(by_rank) for by_rank in zip(*accuracies)] == pytest.approx(accuracy)
    for name, p in whole.parameters.items():
        both = sum(part.parameters[name].grad for part in parts)
        torch.testing.assert_close(both, p.grad, rtol=1e-4, atol=1e-6)


def test_a_failed_save_keeps_the_previous_state(tmp_path):
    save_state(tmp_path, {"step": 1})
    with pytest.raises(InputError, match="cannot be written"):
        save_state(tmp_path, {"step": 2, "other": lambda: None})
    assert torch.load(tmp_path / STATE) == {"step": 1} and len([*tmp_path.iterdir()]) == 1


# -- initial heads: new ones, and heads that --start initializes, which draft as before ----------------------


MARKOV = HeadShape(num_layers=2, drafts=4, markov_rank=4)


def perturbed_head(target, kind: str, shape: HeadShape):
    """Return a head with perturbed weights."""
    return perturb_weights(new_head(target, kind, torch.arange(0, 320, 2), shape, 0))


@pytest.mark.parametrize("kind", ("eagle3", "p-eagle", "dflash", "dspark"))
@torch.no_grad()
def test_a_head_from_start_has_the_same_loss(models, kind):
    """Scaling its features changes nothing. Added layers and Markov heads start as no-ops."""
    target, _ = models
    old = {"dspark": MARKOV, "eagle3": HeadShape()}.get(kind, HeadShape(num_layers=2, drafts=4))
    head = perturbed_head(target, kind, old)
    more = HeadShape() if kind == "eagle3" else dataclasses.replace(MARKOV, num_layers=3)
    initialized = new_head(target, kind, head.draft_ids, more, 1, head)

    old, new = (TRAINED[kind].objective(target, x.requires_grad_(False), 3) for x in (head, initialized))
    if getattr(initialized.args, "confidence", False) and kind != "dspark":
        initialized.args = dataclasses.replace(initialized.args, confidence=False)  # its loss is separate
    new.start = head
    expected, expected_hits, _, states = loss_on(old)
    lengths = torch.tensor([len(row["ids"]) for row in ROWS])
    real = torch.arange(states.normed.shape[1]) < lengths[:, None]
    new.learn_scale(states, real)
    size = (states.features / new.scale)[:, 1:][real[:, 1:]].pow(2).mean(0)  # without the attention sink
    torch.testing.assert_close(size, torch.ones_like(size), rtol=1e-4, atol=0)
    loss, hits, *_ = loss_on(new, states)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(hits, expected_hits)
    assert not torch.equal(initialized.fc.weight, head.fc.weight)
    trained = new.trained()
    for name, tensor in own_state(head).items():
        torch.testing.assert_close(own_state(trained)[name], tensor, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_p_eagle_from_eagle3_has_the_same_first_draft(models):
    target, eagle3 = models
    p_eagle = new_head(target, "p-eagle", eagle3.draft_ids, MARKOV, 1, eagle3)
    assert torch.equal(p_eagle.draft_ids, eagle3.draft_ids)
    assert p_eagle.args.aux_layers == eagle3.args.aux_layers and p_eagle.mask_hidden.any()
    heads = {"eagle3": eagle3, "p-eagle": p_eagle}
    a, b = (loss_on(TRAINED[kind].objective(target, head, 1))[1][0] for kind, head in heads.items())
    assert a == b


def test_a_head_from_start_with_other_draft_ids(models):
    """Rows of common ids are kept. Other lm_head rows are the target's, mapped by least squares; Markov rows
    are zero.
    """
    target, _ = models
    head, ids = perturbed_head(target, "dspark", MARKOV), torch.tensor([0, 3, 4, 100, 319])
    head.lm_head.weight.data = 0.5 * head.lm_head.weight.roll(1, 1)  # its hidden states are not the target's
    map = torch.linalg.lstsq(target.output_layer.weight[::2].double(), head.lm_head.weight.double()).solution
    new, known = new_head(target, "dspark", ids, MARKOV, 1, head), ids % 2 == 0
    assert torch.equal(new.draft_ids, ids) and new.args.draft_vocab_size == 5
    predicted = (target.output_layer.weight[ids].double() @ map).float()
    torch.testing.assert_close(new.lm_head.weight[~known], predicted[~known], rtol=0, atol=2e-3)
    for name in "lm_head", "markov_out":
        rows, old = (getattr(x, name).weight for x in (new, head))
        assert torch.equal(rows[known], old[ids[known] // 2])
    assert not new.markov_out.weight[~known].any()
