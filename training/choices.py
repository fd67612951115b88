"""What the options of train.py choose from, known before torch is there."""
from __future__ import annotations

BLOCK_KINDS = ("p-eagle", "dflash", "dspark")  # heads that draft all tokens in one pass
MULTI_TOKEN = ("medusa", "hydra")  # heads that guess several tokens at once
KINDS = ("eagle3", *BLOCK_KINDS, "eagle", *MULTI_TOKEN)
LOSSES = ("ce", "lk", "coupled")
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}  # what the names stand for
