"""--kv fp8 on PyTorch and --kv int8 on the kernels: drafted text is plain text."""
from itertools import pairwise

import pytest
import torch
from helpers.decoding import check_texts

from engine.drafting import Drafting
from engine.request import Request
from engine.runtime import Runtime
from engine.sampling import Sampling
from engine.target import load_target
from kernels.float8 import Float8Caches, from_bytes, to_bytes
from kernels.packed import Int8Caches
from tree import TreeShape

PROMPT = [256, *b"Once upon a time there was a lighthouse keeper"]


@pytest.mark.parametrize("kv, kind, dtype", [
    ("fp8", Float8Caches, "bf16"), pytest.param("fp8", Float8Caches, "fp32", marks=pytest.mark.slow),
    *(pytest.param("int8", Int8Caches, dtype, marks=pytest.mark.kernels) for dtype in ("bf16", "fp32")),
])
def test_text_is_plain_text(golden, kv, kind, dtype):
    """Three texts in two places, one sampled, over two blocks of slots, with accepted paths that leave gaps.
    """
    target = load_target(golden, Runtime("cpu", dtype, compile=kv == "int8", kv=kv))
    plain = target.engine(Drafting(), max_seq_len=130)
    fast = target.engine(Drafting("eagle3", tree=TreeShape(12, 2, 4)), batch=2, max_seq_len=130)
    assert type(fast.runner.caches) is kind
    given, sampling = [PROMPT, PROMPT[3:], [*PROMPT, 65]], [Sampling(70 - i, i % 2, seed=i) for i in range(3)]
    requests: list[Request] = []
    events = [*fast.run(given, sampling, requests, watch=True)]
    wanted = [plain.generate([prompt], one)[0].ids for prompt, one in zip(given, sampling)]
    check_texts([request.ids for request in requests], wanted, list(zip(given, sampling)))
    paths = [event.draft.path[: len(event.ids)] for event in events if event.draft]
    assert any(b - a > 1 for path in paths for a, b in pairwise(path))  # what is moved is not side by side
    assert requests[2].cached == len(PROMPT) - 1


def test_numbers_are_rounded_and_what_is_too_large_is_the_largest():
    x = torch.tensor([449.0, -1e9, torch.inf, 0.001, 2**-10, 3.4, torch.nan])
    assert from_bytes(to_bytes(x), x.dtype)[:6].tolist() == [448, -448, 448, 2**-9, 0, 3.5]
    assert from_bytes(to_bytes(x), x.dtype)[6].isnan()
