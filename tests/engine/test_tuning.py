"""Choosing a tree: the simulated acceptance is the real one, the best ratio wins, a choice is kept as long as
it holds.
"""
import os

import pytest
import torch

from engine import tuning
from engine.decoder import Decoder
from engine.run import Run
from sampling.options import Sampling
from tree import TreeShape, accept

PROMPTS = [list(b"u:tell me\na:"), list(b"u:why\na:"), list(b"hello world")]


def test_simulated_acceptance_is_that_of_the_real_tree(models):
    """For every recorded step and tree: as many accepted as `accept` finds in the tree that is really pruned.
    """
    target, head = models
    recorder = tuning.Recorder(head)
    run = Run(Decoder(target, recorder, batch=3, max_seq_len=120, compile=False), PROMPTS, Sampling(60))
    for _ in run:
        pass
    texts = [p + ids for p, ids in zip(PROMPTS, run.ids)]
    checked = accepted = 0
    for length, growths in recorder.steps[:12]:
        rows = [b for b, n in enumerate(length.tolist()) if n + tuning.DEEPEST + 1 < len(texts[b])]
        if not rows:
            break
        truth = torch.tensor(
            [texts[b][int(length[b]) + 1 : int(length[b]) + tuning.DEEPEST + 2] for b in rows]
        )
        for k in (2, 4, 10):
            grown = growths[k]
            whole = grown.tokens, grown.scores, grown.parents
            for shape, count in tuning.count_accepted(grown, truth, rows).items():
                grown.shape = shape
                grown.tokens, grown.scores, grown.parents = (x[: shape.depth + 1] for x in whole)
                tree = grown.prune(torch.zeros(3, dtype=torch.int64))
                grown.tokens, grown.scores, grown.parents = whole
                tree = type(tree)(*(None if x is None else x[rows] for x in tree))
                # What the target draws at each depth.
                wanted = torch.cat((truth, truth[:, -1:]), 1).gather(1, tree.depth)
                assert torch.equal(accept(tree, wanted, shape.window)[1] - 1, count.long())
                checked, accepted = checked + 1, accepted + int(count.sum())
            grown.shape = TreeShape(2, tuning.DEEPEST, k)
    assert checked > 500 and accepted > 500


def test_predicted_tau_is_close_to_decoding(models):
    """Statistical, fixed prompts: the steps are not the same ones, their mean is. Within 15 %."""
    from drafters.eagle import Eagle

    target, head = models
    taus = tuning.measure_tau(target, head, PROMPTS, [], tokens=120)
    for shape in (TreeShape(8, 2, 4), TreeShape(24, 4, 6)):
        outputs = Decoder(
            target, Eagle(head, shape), batch=3, max_seq_len=200, compile=False
        ).generate(PROMPTS, Sampling(120))
        lengths = [n for o in outputs for n in o.accept_lengths]
        assert sum(lengths) / len(lengths) == pytest.approx(taus[shape], rel=0.15)


def test_the_best_ratio_wins():
    small, large = TreeShape(4, 1, 2), TreeShape(60, 7, 10)
    taus, level = {small: 1.8, large: 3.0}, {2: 0.001, 10: 0.001}
    # Rows are nearly free, as on a GPU.
    assert tuning.choose(taus, {4: 0.010, 60: 0.011}, level)[0].shape == large
    best = tuning.choose(taus, {4: 0.010, 60: 0.050}, level)[0]
    assert best.shape == small and best.seconds == pytest.approx(0.010 + 2 * 0.001)
    assert [tuning.between({4: 1.0, 8: 3.0}, n) for n in (1, 4, 5, 8, 20)] == [1.0, 1.0, 1.5, 3.0, 3.0]


def test_a_choice_is_kept_until_something_changes(models, tmp_path, monkeypatch):
    target, head = models
    (tmp_path / "model.safetensors").touch()
    said, measured = [], []
    original = tuning.measure_tau
    monkeypatch.setattr(tuning, "measure_tau", lambda *a: measured.append(1) or original(*a, tokens=24))
    monkeypatch.setattr(
        tuning.Costs, "measure", lambda self, original=tuning.Costs.measure: original(self, repeat=1)
    )

    def choose():
        return tuning.auto_tree(target, head, PROMPTS, [], tmp_path, False, said.append)

    first = choose()
    assert isinstance(first, TreeShape) and len(measured) == 1 and any("60/7/10" in line for line in said)
    assert choose() == first and len(measured) == 1 and "chosen before" in said[-1]
    os.utime(tmp_path / "model.safetensors", (2e9, 2e9))  # another head came
    assert choose() and len(measured) == 2
    (tmp_path / "tree.json").write_text("{")
    assert choose() and len(measured) == 3


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_costs(models, monkeypatch):
    """As users run it: every size compiled on its own."""
    monkeypatch.setattr(tuning, "VERIFY_ROWS", (1, 3))
    monkeypatch.setattr(tuning, "LEVEL_ROWS", (2,))
    verify, level = tuning.Costs(*models, compile=True).measure(repeat=3)
    assert verify.keys() == {1, 3} and level.keys() == {2} and all(
        t > 0 for t in [*verify.values(), *level.values()]
    )
