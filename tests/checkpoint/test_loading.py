"""Reading converted folders: what is refused, and what one of several ranks reads."""
import os

import pytest
import torch
from helpers.launching import measured
from helpers.sources import LARGE, target_state, write_source

from checkpoint.convert import convert
from checkpoint.loading import load_model
from common.errors import InputError


def test_lost_and_damaged_weights(target):
    os.truncate(target / "model.safetensors", 1000)
    with pytest.raises(InputError, match="damaged"):
        load_model(target)
    (target / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no such file; convert the checkpoint again"):
        load_model(target)


READ = """
from checkpoint.loading import load_model, shares_of, weigh
from kernels.tp import Ranks
folder, count = Path(argv[0]), int(argv[1])
"""
OWN = """
model, config = load_model(folder, ranks=Ranks(count - 1, count, ""))
result = [sum(p.nbytes for p in model.parameters()), *weigh(folder, None, shares_of(config, count))]
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_reads_its_own_part(tmp_path, count):
    """Its memory grows by that part and little more, and that part is what was told beforehand."""
    source = write_source(tmp_path / "in", target_state(LARGE, torch.bfloat16), LARGE)
    folder = convert(source, tmp_path / "out", quiet=True)
    peak, own, total, most, whole = measured(READ, OWN, folder, count)
    assert total > 200e6 and own == most and abs(most - (whole + (total - whole) / count)) < 0.01 * total
    assert peak < 1.15 * own + 20e6, f"{peak:,} bytes to hold {own:,} of {total:,}"
