"""What is checked and said before a target is dealt among ranks."""
import pytest
import torch

from common.errors import InputError
from engine import target as loading
from engine.runtime import Runtime
from kernels.tp import Ranks


class Alike(Ranks):
    """Two ranks that say the same."""

    def every(self, x):
        return torch.stack((x, x))


RANKS, RUNTIME = Alike(1, 2, ""), Runtime("cpu", compile=False)


@pytest.mark.parametrize("here, enough", [(1, True), (2, False)])
def test_ranks_of_a_machine_share_its_memory(golden, monkeypatch, here, enough):
    """There is room for the weights of one rank, of 0.8 MB, and not of two."""
    said = []
    monkeypatch.setattr(loading, "free_memory", lambda device: 1_100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    if enough:
        loading.check_ranks(golden, RUNTIME, said.append, RANKS)
        return
    with pytest.raises(InputError, match=r"2 ranks: each holds .* GB are free for 2 of them here: take more"):
        loading.check_ranks(golden, RUNTIME, said.append, RANKS)
    assert not said
