"""How large a model may be, and how the sizes of its attention fit together: judged before torch is there."""
from __future__ import annotations

from common.schema import Record, Whole, Wrong

IDS, WIDTH, MANY = Whole(1, 2**24), Whole(1, 2**22), Whole(1, 2**16)  # of a vocabulary; of a matrix; of parts
LAYERS = Whole(1, 10_000)
GUESSES = Whole(1, 64)  # of Medusa and Hydra heads, and the blocks of each
BLOCK = Record({  # of a model
    "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_layers": LAYERS,
    "num_heads": MANY, "num_kv_heads": MANY, "head_dim": MANY,
})
TARGET = Record({**BLOCK.needed, "vocab_size": IDS, "max_seq_len": Whole(1)})


def check_attention(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise Wrong if the sizes of attention contradict each other."""
    if num_heads % num_kv_heads:
        raise Wrong("num_kv_heads", num_kv_heads, f"a divisor of num_heads, {num_heads}")
    if head_dim % 2:
        raise Wrong("head_dim", head_dim, "an even number: rotary embedding needs pairs")
    if num_heads * head_dim > WIDTH.high:
        raise Wrong("head_dim", head_dim, f"at most {WIDTH.high:,} over num_heads, {num_heads}")
