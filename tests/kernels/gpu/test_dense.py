"""The products of a dense target over few tokens, against their definition in float64."""
import pytest
import torch
import torch.nn.functional as F

from kernels.gpu import dense

DTYPES = [torch.float32] if not torch.cuda.is_available() else [torch.bfloat16, torch.float16]


def difference(found, expected) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (1, 5, 16))
@pytest.mark.parametrize("width, hidden", ((256, 512), (576, 192)))  # BLOCK_K divides one of them
def test_the_four_products_of_a_layer(device, dtype, tokens, width, hidden):
    draw = torch.Generator().manual_seed(width + tokens)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=draw) * scale).to(device, dtype)

    attended, stream, norm, next_norm = (
        random(tokens, hidden), random(tokens, width), random(width), random(width))
    wo, gate_up = random(width, hidden, scale=hidden**-0.5), random(2 * hidden, width, scale=width**-0.5)
    wqkv, bias, eps = random(128, width, scale=width**-0.5), random(128), 1e-5

    x, weighted, squares = dense.product(attended, wo, None, None, stream, norm, eps, False)
    gated, *empty = dense.product(weighted, gate_up, squares, None, None, None, eps, True)
    x2, weighted2, squares2 = dense.product(gated, wo, None, None, x, next_norm, eps, False)
    qkv, *_ = dense.product(weighted2, wqkv, squares2, bias, None, None, eps, False)

    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    want = stream.double() + attended.double() @ wo.double().T
    assert difference(x, want) < limit
    normed = F.rms_norm(x.double(), (width,), norm.double(), eps)  # each from the kernel's own input
    gate, up = (normed @ gate_up.double().T).chunk(2, -1)
    assert difference(gated, F.silu(gate) * up) < limit
    assert difference(x2, x.double() + gated.double() @ wo.double().T) < limit
    normed = F.rms_norm(x2.double(), (width,), next_norm.double(), eps)
    assert difference(qkv, normed @ wqkv.double().T + bias.double()) < limit
    assert all(len(each) == 0 for each in empty)
    for found, defined in zip(
        dense.product(attended, wo, None, None, stream, norm, eps, False),
        dense.defined(attended, wo, None, None, stream, norm, eps, False),
    ):
        assert found.shape == defined.shape and difference(found, defined.double()) < limit
