"""What trees are accepted for: measured on few steps for all, as in real decoding, kept in a file."""
import pytest

from checkpoint.calibration import Calibration, Far
from drafters.eagle import Eagle
from engine.calibrate import calibrate
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape

PROMPTS = [list(b"u:tell me\na:"), list(b"u:why\na:"), list(b"hello world")]
SMALL = TreeShape(8, 2, 4)
SHAPES = SMALL, TreeShape(24, 4, 6), TreeShape(3, 2, 1), TreeShape(3, 0, 10)


@pytest.fixture(scope="module")
def known(models):
    return calibrate(models[0], Eagle(models[1], SMALL), PROMPTS, [], tokens=120, far=False)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_predicted_tau_is_close_to_decoding(models, known, temperature, shape):
    """Statistical, fixed prompts: the steps are not the same ones, their mean is. Within 15 %."""
    engine = Engine(models[0], Eagle(models[1], shape), batch=3, max_seq_len=200, compile=False)
    outputs = engine.generate(PROMPTS, [Sampling(120, temperature, seed=i) for i in range(3)])
    lengths = [n for o in outputs for n in o.accept_lengths]
    assert sum(lengths) / len(lengths) == pytest.approx(known.taus[temperature][shape], rel=0.15)


def test_a_calibration_is_kept_and_read_between_temperatures_and_contexts(tmp_path):
    taus = {t: {SMALL: 2 - t / 2, TreeShape(2, 0, 1): 1.25} for t in (0.0, 1.0)}
    known = Calibration(taus, (0.5, 1.5), Far(1128, {0.0: 0.5, 1.0: 1.0}))
    known.write(tmp_path)
    assert Calibration.read(tmp_path) == known and Calibration.read(tmp_path / "nowhere") is None
    for temperature, context, tau in ((0.5, 1, 1.75), (0.0, 628, 1.75), (0.0, 99_999, 1.5), (3.0, 9999, 1.5)):
        assert known.tau(SMALL, temperature, context) == pytest.approx(tau)
