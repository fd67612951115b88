"""GPTQ against rounding to nearest, and against what it must be where inputs are not correlated."""
import pytest
import torch

from kernels.gptq import gptq, output_error, second_moments
from kernels.quantized import dequantize, quantized_values, scales_of


def correlated(inputs: int, rows: int, seed: int) -> torch.Tensor:
    """Inputs [rows, inputs] that share a few directions, as those of a language model do."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, inputs // 8, generator=g) @ torch.randn(inputs // 8, inputs, generator=g)
    return mixed + 0.5 * torch.randn(rows, inputs, generator=g)


@pytest.mark.parametrize("inputs, group", [(64, 64), (192, 32), (320, 64), (384, 128)])
def test_it_keeps_outputs_better_than_the_nearest(inputs, group):
    """Also on inputs that it has not seen. Blocks of columns end in and after groups."""
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    x = correlated(inputs, 4096, seed=0)
    seen, unseen = x[:2048], x[2048:]
    q, scale = gptq(weight, second_moments(seen), group)
    assert q.dtype == torch.int8 and q.min() >= -8 and q.max() <= 7 and (q[3] == 0).all()
    assert scale.dtype == torch.bfloat16 and scale.shape == (40, inputs // group)
    simple = scales_of(weight, "int4", group)
    nearest = dequantize(quantized_values(weight, simple, "int4"), simple, torch.float32)
    for inputs in (seen, unseen):
        error = output_error(weight, dequantize(q, scale, torch.float32), inputs)
        assert error < 0.75 * output_error(weight, nearest, inputs)


def test_second_moments_in_panels(monkeypatch):
    monkeypatch.setattr("kernels.gptq.PANEL_COLUMNS", 24)
    x = correlated(64, 100, seed=2)
    torch.testing.assert_close(second_moments(x), x.T @ x)


def test_where_inputs_are_not_correlated_it_is_the_nearest():
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    want = scales_of(weight, "int4", 64)
    for hessian in (torch.eye(256) * 7, torch.zeros(256, 256)):
        q, scale = gptq(weight, hessian, 64)
        assert torch.equal(scale, want) and torch.equal(q, quantized_values(weight, want, "int4"))
