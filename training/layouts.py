"""In which published layout a trained head is written: known before torch is there."""
from __future__ import annotations

from common.errors import InputError

OWN_VOCABULARY = ("dflash", "dspark")  # published, these draft the target's whole vocabulary
SPECULATORS_ONLY = ("norm_before_residual", "recycle_normed")  # what is said in no other layout


def layout_of(asked: str | None, kind: str, head: dict, vocab_size: int) -> str:
    """The layout of --out, of `checkpoint.heads.LAYOUTS`, for what --layout asks for.

    head: of the head's config.json `draft_vocab_size` and what of SPECULATORS_ONLY it has. vocab_size: the
    target's. Raises InputError if sglang's layout is asked for, alone or as one of both, and has no place
    for the head.
    """
    size, why = head["draft_vocab_size"], ""
    if kind in OWN_VOCABULARY and size < vocab_size:
        why = f"is for the target's {vocab_size:,} token ids, and the head drafts {size:,}: --draft-vocab"
    elif flag := next((flag for flag in SPECULATORS_ONLY if head.get(flag)), ""):
        why = f"has no place for {flag}, which the head of --start has"
    if asked in ("sglang", "both") and why:
        raise InputError(f"--layout {asked}: the layout sglang {why}; take --layout speculators")
    if asked == "speculators" or (asked is None and (why or kind in OWN_VOCABULARY)):
        return "speculators"
    return "sglang"
