"""Quantised layers that cannot be."""

import pytest
import torch
import torch.nn as nn

from kernels.quantized import QuantizedLinear, QuantizedStack, Scheme, quantize_linears


@pytest.mark.parametrize("mode, group, words", [
    ("int2", 0, "mode is 'int2'; expected one of int8, w8a8, int4, w4a8, fp8"),
    ("int8", 32, "group is 32; expected 0 for int8: int4 and w4a8 have groups"),
    ("fp8", 64, "group is 64; expected 0 for fp8"),
    ("w8a8", 32, "group is 32; expected 0 for w8a8"), ("int4", 0, "group is 0; expected one for int4"),
    ("w4a8", 0, "group is 0; expected one for w4a8"),
    ("int4", 32, "group is 32; expected what divides 48 inputs"),
    ("w4a8", 64, "group is 64; expected what divides 48 inputs"),
])
def test_modes_and_groups_that_cannot_be(mode, group, words):
    for make in (
        lambda: QuantizedLinear(48, 8, mode=mode, group=group),
        lambda: QuantizedStack((2, 8, 48), mode, group),
        lambda: QuantizedLinear.of(torch.ones(8, 48), mode, group),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    if mode not in ("int8", "fp8", "w8a8"):  # a scheme has groups for its int4 layers only
        with pytest.raises(ValueError, match=words):
            quantize_linears(nn.Sequential(nn.Linear(48, 8)), Scheme(mode, group, None))
