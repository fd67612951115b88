"""Reading converted folders: what is refused, and what one of several ranks reads."""
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from helpers.sources import CONFIG, target_state, write_source

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


MEASURE = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
import torch
from checkpoint.loading import load_model
from checkpoint.loading import shares_of, weigh
from kernels.tp import Ranks
torch.set_num_threads(1)
folder, count = Path(sys.argv[2]), int(sys.argv[3])
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = status("VmRSS")
model, config = load_model(folder, ranks=Ranks(count - 1, count, ""))
peak, own = status("VmHWM") - before, sum(p.nbytes for p in model.parameters())
print(json.dumps([peak, own, *weigh(folder, None, shares_of(config, count))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' high-water mark")
@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_reads_its_own_part(tmp_path, count):
    """Its memory grows by that part and little more, and that part is what was told beforehand."""
    config = {
        **CONFIG, "hidden_size": 768, "intermediate_size": 2560, "num_attention_heads": 12, "head_dim": 64,
        "num_key_value_heads": 4, "vocab_size": 4096, "num_hidden_layers": 16,
    }
    source = write_source(tmp_path / "in", target_state(config, torch.bfloat16), config)
    folder = convert(source, tmp_path / "out", quiet=True)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, ROOT, folder, str(count)], capture_output=True, text=True, check=True
    )
    peak, own, total, most, whole = json.loads(result.stdout)
    assert total > 200e6 and own == most and abs(most - (whole + (total - whole) / count)) < 0.01 * total
    assert peak < 1.15 * own + 20e6, f"{peak:,} bytes to hold {own:,} of {total:,}"
