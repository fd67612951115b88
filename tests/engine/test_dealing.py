"""What is checked and said before a target is dealt among ranks."""
import pytest
import torch

from common.errors import InputError
from drafters import Drafting
from engine import target as loading
from engine.runtime import Runtime
from engine.target import load_target
from kernels.tp import Ranks


class Alike(Ranks):
    """Two ranks that say the same."""

    def every(self, x):
        return torch.stack((x, x))


RANKS, RUNTIME = Alike(1, 2, ""), Runtime("cpu", compile=False)


def test_what_each_will_hold_is_said_before_it_is_read(golden, monkeypatch):
    said = []
    monkeypatch.setattr(loading, "free_memory", lambda device: 10**12)
    loading.check_ranks(golden, RUNTIME, said.append, RANKS)
    weights = load_target(golden, RUNTIME).model.state_dict()
    total = sum(x.nbytes for x in weights.values())
    table = weights["embed.weight"].nbytes
    assert len(said) == 1 and said[0].endswith("caches 256 numbers a token")
    assert f"{(total + table) / 2e9:.2f} GB of the target's {total / 1e9:.2f} GB" in said[0]


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


def test_what_ranks_cannot_do_yet(golden):
    target = load_target(golden, RUNTIME)
    target.model.ranks = RANKS
    with pytest.raises(InputError, match="--tree auto: several ranks cannot choose trees by time yet"):
        target.engine(Drafting("eagle3", tree="auto"))
