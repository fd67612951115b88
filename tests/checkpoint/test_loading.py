"""Reading converted folders: what is refused."""
import os

import pytest

from checkpoint.loading import build_module, load_head, load_model
from common.errors import InputError


def test_unknown_kinds():
    with pytest.raises(ValueError, match="kind is 'eagle9'; expected 'target' or 'eagle'"):
        build_module({"kind": "eagle9"})


def test_a_target_is_no_head(target):
    model, _ = load_model(target)
    with pytest.raises(InputError, match="where a draft head was expected"):
        load_head(target, model)


def test_lost_and_damaged_weights(target):
    os.truncate(target / "model.safetensors", 1000)
    with pytest.raises(InputError, match="damaged"):
        load_model(target)
    (target / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no such file; convert the checkpoint again"):
        load_model(target)
