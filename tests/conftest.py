"""Shared fixtures: the golden target and its heads, converted once per worker, with a byte tokenizer."""
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from common.errors import InputError  # noqa: E402 - from the path above

pytest.register_assert_rewrite("helpers")  # show values in failed asserts there too
InputError.in_command = True  # messages name flags
torch.set_num_threads(1)  # for tiny models, synchronizing threads takes longer than computing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files that compile first, then other slow ones: workers take files in order, so that short files
    fill the gaps at the end.
    """
    weights, most_expensive = {"compile": 2, "kernels": 2, "expensive": 2, "slow": 1}, {}
    for item in items:
        weight = max((weights.get(mark.name, 0) for mark in item.iter_markers()), default=0)
        most_expensive[item.path] = max(weight, most_expensive.get(item.path, 0))
    items.sort(key=lambda item: -most_expensive[item.path])


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The golden target, converted, with a byte tokenizer, and its heads in `eagle3` and `eagle`."""
    from helpers import GOLDEN
    from helpers.tokenizers import write_byte_tokenizer

    from checkpoint.convert import convert

    folder = tmp_path_factory.mktemp("golden") / "target"
    convert(GOLDEN / "target", folder, quiet=True)
    convert(GOLDEN / "eagle3", target=folder, quiet=True)
    convert(GOLDEN / "eagle1", target=folder, quiet=True)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def models(golden):
    """(target, EAGLE-3 head) in float32."""
    from checkpoint.load import load_head, load_model

    target, _ = load_model(golden)
    return target, load_head(golden / "eagle3", target, "eagle3")


@pytest.fixture(scope="session")
def models1(golden, models):
    """(target, EAGLE-1 head) in float32."""
    from checkpoint.load import load_head

    return models[0], load_head(golden / "eagle", models[0], "eagle")


@pytest.fixture(scope="session")
def llm(golden):
    """The golden target with plain decoding and a batch of two."""
    from helpers.decoding import load

    return load(golden, compile=False, batch=2)
