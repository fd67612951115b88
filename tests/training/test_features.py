"""The target's states: stored ones, and those of a reader, are the computed ones."""
import copy

import pytest
import torch
from helpers.training import ROWS

from checkpoint.loading import load_model
from kernels import isa
from kernels.choose import choose_backend
from training.features import Features, training_copy
from training.processes import Processes


def test_stored_features_are_the_computed_ones(models, tmp_path):
    target, head = models

    def store(processes: Processes = Processes()) -> Features:
        return Features(target, head.args.aux_layers, folder=tmp_path, name="name", processes=processes)

    computed = Features(target, head.args.aux_layers).read(ROWS)
    store().fill(ROWS[:2], 64)
    (file,) = tmp_path.glob("*/*.safetensors")
    size = file.stat().st_size
    second = store(Processes(1, 2))
    second.processes.wait = lambda: None
    second.fill(ROWS, 1)  # one row a batch: the second process has every other one
    assert file.stat().st_size == size and len(list(tmp_path.glob("*/*.safetensors"))) == 2
    other = store()
    other.fill(ROWS, 64)
    other.compute = None  # everything is there
    for row, *expected in zip(ROWS, *computed):
        n = len(row["ids"])
        for a, b in zip(other.read([row]), expected):
            torch.testing.assert_close(a[0], b[:n], rtol=1e-4, atol=1e-5)  # other batches round otherwise


@pytest.mark.parametrize("kernels", (False, pytest.param(True, marks=pytest.mark.kernels)))
def test_a_reader_reads_as_the_target_does(models, tmp_path, kernels):
    target, head = models
    twin = copy.deepcopy(target)
    if kernels:
        assert choose_backend("cpu").prepare(twin)
    expected = Features(target, head.args.aux_layers).read(ROWS)
    got = Features(target, head.args.aux_layers, reader=twin).read(ROWS)
    for i, row in enumerate(ROWS):
        for a, b in zip(got, expected):
            n = len(row["ids"])
            torch.testing.assert_close(a[i, :n], b[i, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features, maker, stays", [
    ({"avx2"}, isa.AMD, False), ({"avx512_bf16"}, isa.AMD, True), ({"avx512_bf16"}, isa.INTEL, False),
    ({"avx512_bf16", "amx_bf16"}, isa.INTEL, True), ({"bf16"}, isa.OTHER, True),
])
def test_a_copy_in_floats_where_they_are_faster(golden, monkeypatch, features, maker, stays):
    target, _ = load_model(golden, dtype=torch.bfloat16)
    monkeypatch.setattr(isa, "features", lambda: frozenset(features))
    monkeypatch.setattr(isa, "maker", lambda: maker)
    copy = training_copy(target)
    assert (copy is target) == stays and target.embed.weight.dtype == torch.bfloat16
    states = Features(copy, (1, 2, 3), dtype=torch.bfloat16)
    assert states.compute([[1, 2, 3]]).normed.dtype == torch.bfloat16
    assert states.read(ROWS[:1]).features.dtype == (torch.bfloat16 if stays else torch.float32)
