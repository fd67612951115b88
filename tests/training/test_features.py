"""The target's states: stored ones, and those of a reader, are the computed ones."""
import copy

import pytest
import torch
from helpers.training import ROWS

from kernels.choose import choose_backend
from training.features import Features, Reader, StoredFeatures
from training.processes import Processes


def test_stored_features_are_the_computed_ones(models, tmp_path):
    target, head = models
    computed = Features(target, head.args.aux_layers).read(ROWS)
    store = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes())
    store.fill(ROWS[:2], 64)
    (file,) = tmp_path.glob("*/*.safetensors")
    size = file.stat().st_size
    second = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes(1, 2))
    second.processes.wait = lambda: None
    second.fill(ROWS, 1)  # one row a batch: the second process has every other one
    assert file.stat().st_size == size and len(list(tmp_path.glob("*/*.safetensors"))) == 2
    other = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes())
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
    reader = Reader(twin, "twin")
    expected = Features(target, head.args.aux_layers).read(ROWS)
    for _ in range(2):  # the second time over what the first has left in the caches
        got = Features(target, head.args.aux_layers, reader=reader).read(ROWS)
        for i, row in enumerate(ROWS):
            for a, b in zip(got, expected):
                n = len(row["ids"])
                torch.testing.assert_close(a[i, :n], b[i, :n], rtol=1e-4, atol=1e-4)
    stores = [
        StoredFeatures(target, head.args.aux_layers, tmp_path, Processes(), reader=r) for r in (None, reader)
    ]
    assert stores[0].folder != stores[1].folder
