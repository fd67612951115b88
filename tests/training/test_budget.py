"""What a large target takes, by arithmetic: the page says what the formulas give, and they know our heads."""
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

from model import ModelArgs
from networks.eagle import Eagle3Head
from training.budget import SIZES, Budget, Size, main, table
from training.features import StoredFeatures
from training.new_head import head_args
from training.processes import Processes
from training.shapes import Shape


def args_of(size: Size) -> ModelArgs:
    return ModelArgs(
        size.vocabulary, size.hidden, size.inner, size.layers, size.hidden // 128, size.kv // 128, 128
    )


def test_the_page_has_the_table(capsys):
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert table() in page
    assert main(["--conversations", "1000", "--tokens", "500"]) == 0
    assert "| tokens | 0.00 billion |" in capsys.readouterr().out


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_heads_are_of_this_size(size):
    args = head_args(args_of(size), "eagle3", size.draft_vocabulary, Shape())
    with torch.device("meta"):
        head = Eagle3Head(args)
    assert sum(p.numel() for p in head.parameters()) == pytest.approx(size.head, rel=1e-3)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_features_are_of_this_size(size, tmp_path):
    weight = torch.empty(0, dtype=torch.bfloat16)
    target = SimpleNamespace(embed=SimpleNamespace(weight=weight), args=args_of(size))
    store = StoredFeatures(target, (2, 3, 4), tmp_path, Processes(), name="large")
    budget = Budget(size)
    assert budget.cache == budget.tokens * store.token_bytes


def test_by_hand():
    budget = Budget(SIZES[0])
    assert budget.tokens == 532_000 * 2180 and budget.cache == pytest.approx(38e12, rel=1e-3)
    assert budget.features == pytest.approx(2 * 8.03e9 * budget.tokens * 4 / (989e12 * 0.4) / 3600)
