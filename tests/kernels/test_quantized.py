"""Quantised layers that cannot be, and libraries that cannot be loaded. Nothing is compiled."""
import os

import pytest
import torch
import torch.nn as nn

from common.errors import InputError
from kernels import cpu
from kernels.quantized import QuantizedLinear, QuantizedStack, quantize_linears


@pytest.mark.parametrize("mode, group, words", [
    ("int2", 0, "quantisation 'int2' is none of int8, w8a8, int4, fp8"),
    ("int8", 32, "int8 with groups of 32: int4 has groups"), ("fp8", 64, "fp8 with groups of 64"),
    ("w8a8", 32, "w8a8 with groups of 32"), ("int4", 0, "int4 with groups of 0"),
    ("int4", 32, "int4 in groups of 32 does not divide 48 inputs"),
])
def test_modes_and_groups_that_cannot_be(mode, group, words):
    for make in (
        lambda: QuantizedLinear(48, 8, mode=mode, group=group),
        lambda: QuantizedStack((2, 8, 48), mode, group),
        lambda: QuantizedLinear.of(torch.ones(8, 48), mode, group),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(ValueError, match=words):
        quantize_linears(nn.Sequential(nn.Linear(48, 8)), False, mode, group)


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "cpu.so").write_bytes(b"no library")
    monkeypatch.setattr(cpu, "_loaded", False)
    monkeypatch.setattr(cpu, "_build", lambda say, meanwhile: tmp_path / "cpu.so")
    with pytest.raises(InputError, match=r"cpu\.so: cannot be loaded .*delete it, or pass --no-kernels"):
        cpu.load_kernels()


def test_libraries_of_other_users_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(cpu, "CACHE", tmp_path / "file" / "kernels")  # as in a read-only checkout
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"eagle-kernels-{os.getuid()}"
    assert cpu._folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    (tmp_path / f"eagle-kernels-{os.getuid()}").mkdir()
    with pytest.raises(InputError, match="belongs to another user"):
        cpu._folder()
