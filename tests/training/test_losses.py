"""Losses against their definitions, and on heads that run as the decoder runs them."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.training import ROWS, loss_on, shaken

from model import KVCache
from networks.p_eagle import PEagleHead
from networks.weights import twin
from training.heads import TRAINED, HeadShape, new_head
from training.losses import STEP_DECAY, TOKEN_LOSS_WEIGHT, DraftLoss


def test_losses_are_summed_with_their_shares():
    """Gradients for what the lm_head reads and for itself, over more rows than a block holds."""
    g = torch.Generator().manual_seed(3)
    x, head = torch.randn(300, 8, generator=g), torch.randn(30, 8, generator=g)
    teacher, places = torch.randn(50, 30, generator=g), torch.randint(0, 50, (300,), generator=g)
    weight = torch.rand(300, generator=g)
    x.requires_grad_(True), head.requires_grad_(True)
    loss, overlap, right = DraftLoss.apply(x, head, teacher, places, weight, 0.7)
    found = torch.autograd.grad(loss, (x, head))
    logits, p = x @ head.T, teacher[places].softmax(-1)
    q = logits.softmax(-1)
    ce, lk = -(p * q.log()).sum(-1), -torch.minimum(p, q).sum(-1).log()
    expected = ((0.3 * ce + 0.7 * lk) * weight).sum()
    torch.testing.assert_close(loss, expected)
    assert torch.equal(right, (logits.argmax(-1) == p.argmax(-1)).float()) and right.any()
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(-1).detach())
    for a, b in zip(found, torch.autograd.grad(expected, (x, head))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def chain(head, features, ids: list[int], j: int, steps: int):
    """Yield what the lm_head reads [H] at each step of a chain from position j, drafted with caches."""
    caches, at = [KVCache(1, 64, head.args, torch.float32, "cpu")], torch.arange(j + 1)[None]
    tokens, h = torch.tensor([ids[1 : j + 2]]), head.fuse(features[None, : j + 1])
    for step in range(steps):
        h = head(tokens, h, at, at, torch.arange(64) <= at[..., None], caches)[:, -1:]
        yield h[0, 0]
        at, tokens = torch.tensor([[j + step + 1]]), torch.tensor([[ids[j + step + 2]]])


def block(head, features, ids: list[int], j: int):
    """Return what the lm_head reads in a block after position j [K, H], drafted with caches."""
    n, args, slots = j + 1, head.args, torch.arange(64)
    caches, context = head.caches(1, 64, torch.float32, "cpu"), head.fuse(features[None, :n])
    if isinstance(head, PEagleHead):
        at = torch.arange(n + args.drafts - 1)[None]
        hidden = head.fuse(head.mask_hidden[None, None]).expand(1, args.drafts - 1, -1)
        tokens = torch.tensor([ids[1 : j + 2] + [args.mask_id] * (args.drafts - 1)])
        h = head(tokens, torch.cat((context, hidden), 1), at, at, slots <= at[..., None], caches)
        return head.rows(h)[0, -args.drafts :]
    at = torch.arange(n + args.block)[None]
    last = torch.where(at < n, at, at if args.causal else n + args.block - 1)
    visible, before = (slots <= x[..., None] for x in (last, at))
    return head(torch.tensor([ids[j + 1]]), context, at, at, visible, caches, before=before)[0]


def drafted(head, features, row: dict, steps: int):
    """Yield (draft step, position j, what the lm_head reads) of every prediction that exists."""
    for begin, end in row["answers"]:
        for j in range(begin - 1, end - 2):
            found = block(head, features, row["ids"], j) if head.args.drafts else chain(
                head, features, row["ids"], j, steps)
            for step, h in zip(range(end - 2 - j), found):
                yield step, j, h


SHAPES = {  # of block heads that are made here; a causal DFlash head is JetSpec's
    "p-eagle": HeadShape(num_layers=2, drafts=3, mask_id=7),
    "dflash": HeadShape(num_layers=2, drafts=3, states=2),
    "dspark": HeadShape(drafts=4, markov_rank=6, states=2),
    "p-eagle+markov": HeadShape(drafts=3, markov_rank=6),
    "dflash+causal": HeadShape(num_layers=2, drafts=3, states=2),
    "dflash+window": HeadShape(num_layers=2, drafts=3, states=2),
}


@pytest.mark.parametrize("name", ("eagle", "eagle3", "eagle3+window", *SHAPES))
def test_losses_are_the_drafters_rows(models, models1, name):
    """All positions; cross-entropy, EAGLE-1's regression, what the Markov head adds and what the confidence
    head costs. Every weight of a block head learns, and those that it borrows do not.
    """
    kind, _, variant = name.partition("+")
    target, head = models1 if kind == "eagle" else models
    if name in SHAPES:
        head = shaken(new_head(target, kind, torch.arange(0, 320, 2), SHAPES[name], 0))
        head.args = replace(head.args, causal=True) if variant == "causal" else head.args
    else:
        head = twin(head, target, torch.float32)
    (head.layers[0] if kind in ("dflash", "dspark") else head.layer).window = 3 * (variant == "window")
    args, ids, lk = head.args, head.draft_ids, 0.7 * (name in SHAPES)
    objective = TRAINED[kind].objective(target, head, 4, lk=lk)
    steps = objective.steps
    losses = [torch.zeros(()) for _ in range(steps)]
    right, valid, scored = [0] * steps, [0] * steps, [0] * steps
    with torch.no_grad():
        loss, hits, batch, states = loss_on(objective)
        for state, row in zip(states.normed, ROWS):
            teacher = F.linear(state, target.lm_head.weight[ids]).softmax(-1)
            features = target.causal(torch.tensor([row["ids"]]), args.aux_layers)[1][0]
            for i, j, h in drafted(head, features, row, steps):
                valid[i] += 1
                if row["ids"][j + 2 + i] not in ids:
                    continue
                scored[i] += 1
                before, logits, p = torch.tensor(row["ids"][j + 1 + i]), head.logits(h), teacher[j + 1 + i]
                if getattr(args, "markov_rank", 0):
                    logits = logits + head.markov_logits(h, before)
                right[i] += int(logits.argmax() == p.argmax())
                entropy = -(p * logits.log_softmax(-1)).sum()
                accepted = torch.minimum(p, logits.softmax(-1)).sum()
                losses[i] = losses[i] + (1 - lk) * entropy - lk * accepted.log()
                if kind == "eagle":
                    regression = F.smooth_l1_loss(h, state[j + 1])
                    losses[i] = losses[i] + regression - (1 - TOKEN_LOSS_WEIGHT) * entropy
                if getattr(args, "confidence", False):
                    confidence = head.confidence_logit(h, before)
                    losses[i] = losses[i] + F.binary_cross_entropy_with_logits(confidence, accepted)
    expected = sum(STEP_DECAY**i * total / n for i, (total, n) in enumerate(zip(losses, scored)))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert batch.scored == scored and hits.tolist() == right and batch.valid == valid
    # Both answers of the last row, nothing between them.
    assert valid[0] == 8 + 6 + 2 + 5 + 8 and 0 < scored[0] <= valid[0]
    if name in SHAPES:
        loss_on(objective)[0].backward()
        own = {name: p for name, p in head.named_parameters() if p.requires_grad}
        assert not [name for name, p in own.items() if p.grad is None or not p.grad.any()]
        assert target.embed.weight.grad is None
