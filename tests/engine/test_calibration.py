"""What trees are accepted for: simulated on recorded steps as in real decoding, kept in a file."""

import pytest
import torch

from checkpoint.calibration import Calibration, Far
from drafters.eagle import Eagle
from engine.calibrate import DEEPEST, Recorder, calibrate, count_accepted
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape, accept

PROMPTS = [list(b"u:tell me\na:"), list(b"u:why\na:"), list(b"hello world")]


def test_simulated_acceptance_is_that_of_the_real_tree(models):
    """For every recorded step and tree: as many accepted as `accept` finds in the tree that is really pruned.
    """
    target, head = models
    recorder = Recorder(Eagle(head, TreeShape(8, 2, 4)))
    engine = Engine(target, recorder, batch=3, max_seq_len=120, compile=False)
    texts = [request.tokens for request in engine.generate(PROMPTS, Sampling(60))]
    checked = accepted = 0
    for _, length, growths in recorder.steps[:12]:
        rows = [b for b, n in enumerate(length.tolist()) if n + DEEPEST + 1 < len(texts[b])]
        if not rows:
            break
        truth = torch.tensor([texts[b][int(length[b]) + 1 : int(length[b]) + DEEPEST + 2] for b in rows])
        for k in (2, 4, 10):
            grown = growths[k]
            whole = grown.tokens, grown.scores, grown.parents
            for shape, count in count_accepted(grown, truth, rows).items():
                grown.shape = shape
                grown.tokens, grown.scores, grown.parents = (x[: shape.depth + 1] for x in whole)
                tree = grown.prune(torch.zeros(3, dtype=torch.int64))
                grown.tokens, grown.scores, grown.parents = whole
                tree = type(tree)(*(None if x is None else x[rows] for x in tree))
                # What the target draws at each depth.
                wanted = torch.cat((truth, truth[:, -1:]), 1).gather(1, tree.depth)
                assert torch.equal(accept(tree, wanted, shape.window)[1] - 1, count.long())
                checked, accepted = checked + 1, accepted + int(count.sum())
            grown.shape = TreeShape(2, DEEPEST, k)
    assert checked > 500 and accepted > 500


@pytest.fixture(scope="module")
def known(models):
    return calibrate(models[0], Eagle(models[1], TreeShape(8, 2, 4)), PROMPTS, [], tokens=120)


@pytest.mark.slow
@pytest.mark.parametrize("temperature, shape", ((0.0, TreeShape(24, 4, 6)), (1.0, TreeShape(8, 2, 4))))
def test_predicted_tau_is_close_to_decoding(models, known, temperature, shape):
    """Statistical, fixed prompts: the steps are not the same ones, their mean is. Within 15 %."""
    engine = Engine(models[0], Eagle(models[1], shape), batch=3, max_seq_len=200, compile=False)
    outputs = engine.generate(PROMPTS, [Sampling(120, temperature, seed=i) for i in range(3)])
    lengths = [n for o in outputs for n in o.accept_lengths]
    assert sum(lengths) / len(lengths) == pytest.approx(known.taus[temperature][shape], rel=0.15)
    assert known.far.context == models[0].args.max_seq_len - 120 - 1 and len(known.ease) == len(PROMPTS)
    assert known.tau(shape, 0.5) == pytest.approx((known.tau(shape, 0) + known.tau(shape, 1)) / 2)


def test_a_calibration_is_written_and_read(tmp_path):
    taus = {t: {TreeShape(8, 2, 4): 1.5 + t, TreeShape(2, 0, 1): 1.25} for t in (0.0, 1.0)}
    known = Calibration(taus, (0.5, 1.5), Far(900, {0.0: 0.75, 1.0: 0.5}))
    known.write(tmp_path)
    assert Calibration.read(tmp_path) == known and Calibration.read(tmp_path / "nowhere") is None
