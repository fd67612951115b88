"""GPTQ has a lower error than rounding to nearest, and equals it for uncorrelated inputs."""
import pytest
import torch

from kernels.gptq import gptq
from kernels.stored import expand_scales, int4_kind


def correlated(inputs: int, rows: int, seed: int) -> torch.Tensor:
    """Return inputs [rows, inputs] that share a few directions, like activations of a language model."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, inputs // 8, generator=g) @ torch.randn(inputs // 8, inputs, generator=g)
    return mixed + 0.5 * torch.randn(rows, inputs, generator=g)


@pytest.mark.parametrize("inputs, group, span", [
    (64, 64, 2048), (192, 32, 2048), (320, 64, 2048), (384, 128, 2048), (320, 64, 128)])
def test_gptq_beats_rounding_to_nearest(inputs, group, span, monkeypatch):
    """On calibration and held-out inputs; also with several spans, of which the last is shorter."""
    monkeypatch.setattr("kernels.gptq.SPAN_COLUMNS", span)
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    x = correlated(inputs, 4096, seed=0)
    calibration, held_out = x[:2048], x[2048:]
    kind = int4_kind(group)
    quantized = gptq(weight, calibration, kind)
    assert [(x.dtype, *x.shape) for x in quantized] == [
        (dtype, 40, size) for size, dtype in kind.sizes(inputs).values()]
    assert not kind.dequantize(*quantized)[3].any()
    scales = kind.fit(weight)
    nearest = kind.dequantize(kind.round(weight, *scales), *scales)
    for x in (calibration, held_out):
        error, nearest_error = ((x @ (w - weight).t()).norm() for w in (kind.dequantize(*quantized), nearest))
        assert error < 0.75 * nearest_error


def test_uncorrelated_inputs_round_to_nearest():
    """Only scales may differ, by up to 1 %."""
    weight, kind = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)), int4_kind(64)
    nearest_scales = expand_scales(kind, *kind.fit(weight))
    for x in (torch.eye(256) * 7, torch.zeros(1, 256)):
        q, *scales = gptq(weight, x, kind)
        gptq_scales = expand_scales(kind, *scales)
        atol = 0.01 * float(nearest_scales.max())
        torch.testing.assert_close(gptq_scales, nearest_scales, rtol=0.01, atol=atol)
        assert torch.equal(q, kind.round(weight, *scales))
