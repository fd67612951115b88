"""The target's states, in the dtype that this CPU multiplies sooner."""
import pytest
import torch
from helpers.training import ROWS

from checkpoint.load import load_model
from kernels import isa
from training.features import Features, training_copy


@pytest.mark.parametrize("fast", (False, True))
def test_a_target_in_bfloat16(golden, monkeypatch, fast):
    """It is computed in floats where these are faster."""
    monkeypatch.setattr(isa, "features", lambda: {"avx512_bf16", "amx_bf16"} if fast else {"avx512_bf16"})
    monkeypatch.setattr(isa, "vendor", lambda: isa.INTEL)
    target, _ = load_model(golden, dtype=torch.bfloat16)
    states = Features(training_copy(target), (1, 2, 3), dtype=torch.bfloat16)
    assert states.compute([1, 2, 3]).normed.dtype == target.embed.dtype == torch.bfloat16
    assert states.read(ROWS[:1]).features.dtype == (torch.bfloat16 if fast else torch.float32)
