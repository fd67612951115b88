"""Tree attention in one kernel against its definition: masked attention over the whole cache."""
import pytest
import torch
from helpers.ahead_of_time import dear

from kernels.backend import TORCH
from kernels.gpu import attention, cases, check
from kernels.gpu.cache import move_slots
from kernels.gpu.launch import counters

DTYPES = [torch.float32]
if torch.cuda.is_available():  # the interpreter multiplies 16-bit numbers in its own way
    DTYPES += [torch.bfloat16, torch.float16]


CASES = (  # B, T, nh, nkv, hd, M, lengths, norm, window
    (1, 1, 4, 2, 16, 1, [130], False, 0),
    (2, 5, 4, 2, 16, 5, [3, 150], True, 0),
    (2, 4, 6, 3, 20, 12, [40, 0], False, 0),  # the beam of a draft level: eight rows of M are in the cache
    (2, 4, 6, 3, 20, 12, [40, 0], False, 3), (2, 5, 4, 2, 16, 5, [3, 150], True, 40),
    (1, 40, 4, 2, 16, 40, [100], False, 9),
    *dear(*zip((
        (1, 1, 4, 2, 16, 1, [0], False, 0), (1, 1, 9, 3, 64, 1, [77], False, 0),
        (1, 60, 4, 1, 16, 60, [100], False, 0), (3, 10, 2, 2, 128, 30, [64, 65, 101], True, 0),
        (1, 64, 4, 4, 16, 64, [96], False, 0),
        (1, 3, 7, 1, 80, 3, [70], True, 0), (2, 2, 5, 1, 96, 4, [9, 65], False, 0),
        (1, 2, 2, 1, 256, 2, [40], False, 0),
    ))),
)


@pytest.fixture
def made(device, monkeypatch):
    """made(dtype, sizes, float8): the case of these sizes; all counters are zeros after it."""
    monkeypatch.setattr(attention, "programs_at_once", lambda device: 16)  # so that keys are split

    def case(dtype, sizes, float8=False):
        B, T, *heads, M, lengths, norm, window = sizes
        name = str(dtype).removeprefix("torch.")
        given = cases.Sizes(device, name, heads, norm, window, float8, 32, ())
        return cases.attention(given, B, T, M, lengths)

    yield case
    assert not counters(torch.empty(0, device=device).device, 1).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", CASES)
def test_attention(made, backend, dtype, sizes):
    """The same numbers each time, and those of the definition."""
    case = made(dtype, sizes)
    check.check(case, backend)
    assert check.difference(case.run(backend), case.run(backend), 0) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [CASES[i] for i in (0, 2, 3, 9)])
def test_attention_over_float8(made, backend, dtype, sizes):
    """Keys and values are rounded like those of the definition, or to the next number, if nearly so."""
    case = made(dtype, sizes, True)
    (found, held), (wanted, kept) = case.run(backend), case.run(TORCH)
    other = torch.cat([(a != b).float().flatten() for a, b in zip(held, kept)])
    assert other.mean() < 1e-3 and check.difference(held, kept, 0.13) is None
    assert check.difference(found, wanted, 0.1 if other.any() else cases.LIMITS[dtype]) is None
    if dtype == torch.float32:  # its own keys are rounded, too
        assert check.difference(found, made(dtype, sizes).run(TORCH)[0], 1e-4) is not None


def test_move_in_a_cache_of_gigabytes(device):
    """Offsets do not fit 32 bits: planes of 2^30 numbers, of which little is touched."""
    kv = torch.empty(2, 2, 1, 1, 2**23, 128, dtype=torch.int8, device=device)
    planes = kv.view(4, 2**23, 128)
    for plane in range(4):
        planes[plane, 5], planes[plane, 6] = plane + 1, 0
    move_slots(kv, torch.tensor([[5]], device=device), torch.tensor([[6]], device=device))
    assert planes[:, 6, 0].tolist() == [1, 2, 3, 4]
