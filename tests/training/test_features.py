"""The target's states: stored ones are the computed ones, memory and disk are bounded."""
import copy
import shutil

import pytest
import torch
from helpers.training import ROWS

from checkpoint.loading import load_model
from common.errors import InputError
from kernels.choose import choose_backend
from training import features as features_room
from training.features import Features, Reader, StoredFeatures, training_copy
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


def test_a_full_disk_is_told_beforehand(models, tmp_path, monkeypatch, capsys):
    target, head = models
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 2**28 + 1000})())
    with pytest.raises(InputError, match=r"needs 0\.\d+ GB"):
        StoredFeatures(target, head.args.aux_layers, tmp_path, Processes()).fill(ROWS, 64)
    assert "features of 4 rows: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_memory_is_bounded(models):
    target, head = models
    features = Features(target, head.args.aux_layers, room=1)
    first = features.read(ROWS)
    assert len(features.cached) == 1  # the one that used the room up
    for a, b in zip(first, features.read(ROWS)):
        assert torch.equal(a, b)


def test_a_copy_in_floats_where_they_are_faster(golden, tmp_path, monkeypatch):
    """As it was measured when a training began, whatever is measured when it goes on."""
    target, _ = load_model(golden, dtype=torch.bfloat16)
    works = [tmp_path / "slower", tmp_path / "faster"]

    def copied(model, work, faster: bool):
        monkeypatch.setattr(features_room, "float32_is_faster", lambda dtype: faster)
        return training_copy(model, work, Processes())

    for faster, work in enumerate(works):
        work.mkdir()
        assert (copied(target, work, bool(faster)) is target) == (not faster)
    assert copied(target, works[0], True) is target
    copy = copied(target, works[1], False)
    assert copy.embed.weight.dtype == torch.float32 and target.embed.weight.dtype == torch.bfloat16
    assert copied(copy, works[0], False) is copy
    states = Features(copy, (1, 2, 3), dtype=torch.bfloat16)
    assert states.compute([[1, 2, 3]]).normed.dtype == torch.bfloat16
    assert states.read(ROWS[:1]).features.dtype == torch.float32
