"""The names of the dtypes that a model may compute in."""
from __future__ import annotations

from common.errors import InputError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # short name: PyTorch's
KV_DTYPES = ("auto", "int8", "fp8")  # of the target's keys and values; auto: the model's own


def short_dtype(name: str) -> str:
    """Return the short name of a dtype that is given by either name. Raises InputError on any other."""
    for short, long in DTYPES.items():
        if name in (short, long):
            return short
    raise InputError(f"dtype {name!r}: unknown; choose from {', '.join([*DTYPES, *DTYPES.values()])}")
