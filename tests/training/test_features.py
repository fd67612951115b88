"""The target's states: stored ones, and those of a reader, are the computed ones."""
import copy

import pytest
import torch
from helpers.training import ROWS

from checkpoint.loading import load_model
from kernels import isa
from kernels.choose import choose_backend
from training.features import Features, training_copy


def test_stored_features_are_the_computed_ones(models, tmp_path):
    target, head = models
    computed = Features(target, head.args.aux_layers).read(ROWS)
    for rows in (ROWS[:2], ROWS, ROWS):  # the last time everything is there
        stored = Features(target, head.args.aux_layers, folder=tmp_path, name="name")
        stored.fill(rows, 64)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    stored.compute = None
    for row, *expected in zip(ROWS, *computed):
        n = len(row["ids"])
        for a, b in zip(stored.read([row]), expected):
            torch.testing.assert_close(a[0], b[:n], rtol=1e-4, atol=1e-5)  # other batches round otherwise


@pytest.mark.kernels
def test_a_reader_reads_as_the_target_does(models):
    target, head = models
    twin = copy.deepcopy(target)
    assert choose_backend("cpu").prepare(twin)
    expected, got = (Features(target, head.args.aux_layers, reader=x).read(ROWS) for x in (None, twin))
    for i, row in enumerate(ROWS):
        for a, b in zip(got, expected):
            n = len(row["ids"])
            torch.testing.assert_close(a[i, :n], b[i, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", (False, True))
def test_a_target_in_bfloat16(golden, monkeypatch, fast):
    """It is computed in floats where these are faster."""
    monkeypatch.setattr(isa, "features", lambda: {"avx512_bf16", "amx_bf16"} if fast else {"avx512_bf16"})
    monkeypatch.setattr(isa, "maker", lambda: isa.INTEL)
    target, _ = load_model(golden, dtype=torch.bfloat16)
    states = Features(training_copy(target), (1, 2, 3), dtype=torch.bfloat16)
    assert states.compute([[1, 2, 3]]).normed.dtype == target.embed.weight.dtype == torch.bfloat16
    assert states.read(ROWS[:1]).features.dtype == (torch.bfloat16 if fast else torch.float32)
