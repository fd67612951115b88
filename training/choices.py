"""What the options of train.py choose from, known before torch is there."""
from __future__ import annotations

BLOCK_KINDS = ("p-eagle", "dflash", "dspark")  # heads that draft all tokens in one pass
MULTI_TOKEN = ("medusa", "hydra")  # heads that guess several tokens at once
KINDS = ("eagle3", *BLOCK_KINDS, "eagle", *MULTI_TOKEN)
# What a head may begin as, and become.
BEGINNINGS = {(kind, kind) for kind in ("eagle3", *BLOCK_KINDS)} | {("eagle3", "p-eagle")}
DRAFT_VOCAB = 8192  # ids that heads draft, if the target has as many
LOSSES = ("ce", "lk", "coupled")
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}  # what the names stand for
SHORTEST = 3  # tokens of an answer: one from the target, one for the head to read, one to predict


def check_start(kind: str, wanted: str) -> None:
    """Raise ValueError unless a head of one kind may begin as one of another."""
    if (kind, wanted) not in BEGINNINGS:
        raise ValueError(f"--start: a head of kind {wanted} cannot begin as one of kind {kind}")
