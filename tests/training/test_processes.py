"""The processes that torchrun starts; what they compute together is in test_resume.py."""
import pytest
import torch

from common.errors import InputError
from training.processes import Processes


def test_a_group_that_is_described_in_part(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="WORLD_SIZE is set but not what belongs to it"):
        Processes.from_environment("cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Processes.from_environment("cpu").count == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE='two' in the environment: must be 1 to"):
        Processes.from_environment("cpu")


def test_each_process_has_a_device_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Processes(5, 8).own_device("cuda") == "cuda:3" and chosen == [torch.device("cuda:3")]
    assert Processes(5, 8).own_device("cpu") == "cpu" and Processes().own_device("cuda") == "cuda"
    assert Processes().own_device("cuda:1") == "cuda:1"
    assert chosen == [torch.device("cuda:3"), torch.device("cuda:1")]
