"""What a pass over a chunk of a long prompt takes: memory that grows with the text, not with its square."""
from unittest.mock import patch

import pytest
import torch
from shapes import SHAPES, random_models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from kernels.choose import choose_backend
from model import ModelArgs
from tree import TreeShape

CHUNK, VOCABULARY, GROUP = 64, 509, 2  # GROUP query heads share a key/value head
PATHS = ("PyTorch", pytest.param("kernels", marks=pytest.mark.kernels))


class Made(TorchDispatchMode):
    """Collects the sizes in bytes, and the shapes, of all tensors that operators allocate."""

    def __init__(self):
        super().__init__()
        self.bytes, self.shapes = [], set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.bytes.append(x.untyped_storage().nbytes())
                self.shapes.add(tuple(x.shape))
        return result


@torch.no_grad()
def last_chunk(length: int, on_kernels: bool) -> Made:
    """What the pass over the last chunk of a prompt makes, the largest of all: it looks back on the others.
    """
    shape = ModelArgs(VOCABULARY, 32, 32, 4, GROUP, 1, 16, max_seq_len=2 * length), VOCABULARY, 32
    with patch.dict(SHAPES, narrow=shape):
        target, head = random_models("narrow", torch.float32, "cpu", None)
    if on_kernels:
        assert choose_backend("cpu").prepare(target, head)
    drafter = HeadDrafter(head, TreeShape(8, 2, 3))
    engine = Engine(target, drafter, max_seq_len=length + 2, compile=False, chunks=(CHUNK,))
    request = engine.admit([7] * length, Sampling(1))
    request.prefilled = length - CHUNK
    with Made() as made:
        engine._prefill_chunk()
    assert engine.state.n_new.tolist() == [1]  # the prompt has been read, and gave a token
    return made


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_a_chunk_grows_with_the_text(path):
    """The largest tensor is the mask: a row of the chunk by the slots of the text, for PyTorch's attention
    in float32 and for each query head. All that is made together is a few of these.
    """
    short, long = (last_chunk(length, path == "kernels") for length in (8_192, 32_768))
    width = 1 if path == "kernels" else GROUP * 4  # bytes for each row and slot
    for made, length in ((short, 8_192), (long, 32_768)):
        assert width * CHUNK * length <= max(made.bytes) < 1.1 * width * CHUNK * length
        # Logits are made of one row, not of a chunk: at a vocabulary of 128k a row has half a megabyte.
        scored = {shape for shape in made.shapes if shape[-1:] == (VOCABULARY,) and shape[0] != VOCABULARY}
        assert scored and all(torch.Size(shape).numel() == VOCABULARY for shape in scored)
    assert sum(long.bytes) < 4.1 * sum(short.bytes) < 4.1 * 20 * width * CHUNK * 8_192
