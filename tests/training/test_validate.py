"""Validation is the real decoder."""
import pytest

from drafters.eagle import Eagle
from engine.decoder import Decoder
from sampling.options import Sampling
from training.validate import Validator
from tree import TreeShape

PROMPTS = [list(b"u:question 3\na:"), list(b"u:what is 4?\na:"), list(b"u:abc\na:")]


def test_validation_is_the_real_decoder(models):
    target, head = models
    shape = TreeShape(16, 3, 4)
    decoder = Decoder(target, Eagle(head, shape), batch=3, compile=False, max_seq_len=200)
    lengths = [n for o in decoder.generate(PROMPTS, Sampling(40)) for n in o.accept_lengths]
    tau = Validator(target, PROMPTS, [], shape, 40, packed=False).tau(head)
    assert tau == pytest.approx(sum(lengths) / len(lengths))
    assert sum(lengths) / len(lengths) > 1.05
