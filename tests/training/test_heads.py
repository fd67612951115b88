"""The heads that training starts from: new ones, and those that begin as others and draft as before."""
import dataclasses

import pytest
import torch
from helpers.training import ROWS, loss_on, shaken

from networks.weights import own_state
from training.heads import TRAINED, HeadShape, new_head

MARKOV = HeadShape(num_layers=2, drafts=4, markov_rank=4)


def made(target, kind: str, shape: HeadShape):
    """A head whose weights are not those of a new one."""
    return shaken(new_head(target, kind, torch.arange(0, 320, 2), shape, 0))


@pytest.mark.parametrize("kind", ("eagle3", "p-eagle", "dflash", "dspark"))
@torch.no_grad()
def test_it_drafts_as_the_other_one(models, kind):
    """Though it reads features by their scale from now on. Layers and heads that are added add nothing."""
    target, _ = models
    old = {"dspark": MARKOV, "eagle3": HeadShape()}.get(kind, HeadShape(num_layers=2, drafts=4))
    head = made(target, kind, old)
    more = HeadShape() if kind == "eagle3" else dataclasses.replace(MARKOV, num_layers=3)
    begun = new_head(target, kind, head.draft_ids, more, 1, head)

    one, other = (TRAINED[kind].objective(target, x.requires_grad_(False), 3) for x in (head, begun))
    if getattr(begun.args, "confidence", False) and kind != "dspark":
        begun.args = dataclasses.replace(begun.args, confidence=False)  # whose loss is beside the others
    other.start = head
    expected, right, _, states = loss_on(one)
    lengths = torch.tensor([len(row["ids"]) for row in ROWS])
    real = torch.arange(states.normed.shape[1]) < lengths[:, None]
    other.learn_scale(states, real)
    size = (states.features / other.scale)[:, 1:][real[:, 1:]].pow(2).mean(0)  # the first is a sink
    torch.testing.assert_close(size, torch.ones_like(size), rtol=1e-4, atol=0)
    found, same, *_ = loss_on(other, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(same, right)
    assert not torch.equal(begun.fc.weight, head.fc.weight)
    trained = other.trained()
    for name, tensor in own_state(head).items():
        torch.testing.assert_close(own_state(trained)[name], tensor, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_p_eagle_begins_as_eagle3(models):
    """Its first draft is that of the EAGLE-3 head."""
    target, head = models
    begun = new_head(target, "p-eagle", head.draft_ids, MARKOV, 1, head)
    assert torch.equal(begun.draft_ids, head.draft_ids) and begun.args.aux_layers == head.args.aux_layers
    assert begun.mask_hidden.any()
    one, other = (TRAINED[kind].objective(target, x, 1) for kind, x in (("eagle3", head), ("p-eagle", begun)))
    assert loss_on(one)[1][0] == loss_on(other)[1][0]


def test_another_vocabulary(models):
    """Rows that the other head has are its own. The rest are the target's, turned as its own best are."""
    target, _ = models
    head, ids = made(target, "dspark", MARKOV), torch.tensor([0, 3, 4, 100, 319])
    head.lm_head.weight.data = 0.5 * head.lm_head.weight.roll(1, 1)  # for states of its own
    turn = torch.linalg.lstsq(target.lm_head_weight[::2].double(), head.lm_head.weight.double()).solution
    begun, known = new_head(target, "dspark", ids, MARKOV, 1, head), ids % 2 == 0
    assert torch.equal(begun.draft_ids, ids) and begun.args.draft_vocab_size == 5
    foreseen = (target.lm_head_weight[ids].double() @ turn).float()
    torch.testing.assert_close(begun.lm_head.weight[~known], foreseen[~known], rtol=0, atol=2e-3)
    for name in "lm_head", "markov_out":
        rows, old = (getattr(x, name).weight for x in (begun, head))
        assert torch.equal(rows[known], old[ids[known] // 2])
    assert not begun.markov_out.weight[~known].any()
