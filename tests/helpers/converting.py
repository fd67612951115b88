"""What the tests of conversion share."""
import torch

from convert_checkpoint import main


def assert_same(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


def run(capsys, *argv) -> tuple[int, list[str]]:
    """(Exit status, lines on stderr) of convert_checkpoint.py."""
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err.splitlines()
