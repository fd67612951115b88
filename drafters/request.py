"""What a drafter is built from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drafters.no_use import refuse
from drafters.tree_spec import TreeSpec
from model import Transformer
from tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """The target that a drafter is for, and what the user asked for."""

    method: str  # a name of `drafters.METHODS`
    checkpoint: Path  # of the target
    target: Transformer
    tokenizer: Tokenizer | None
    draft: Path | None  # what --draft names
    tree: TreeSpec  # what --tree says; each drafter resolves it
    default_tree: TreeSpec  # what it takes if --tree says nothing
    coupled: bool
    max_seq_len: int  # tokens there is room for
    reach: int  # of the last tokens of a text, that a head is to attend to; 0: all
    rule: str  # how nodes are accepted, see `sampling.options.RULES`
    flags: dict  # all flags of the method's own
    prepare: Callable[..., None]  # prepare(*models) puts models on the kernels, where there are any

    def refuse(self, **options) -> None:
        """Raise InputError if any of these options, which mean nothing to the method, has a value."""
        refuse(self.method, **options)
