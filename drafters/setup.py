"""What a drafter is built from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.load import load_head
from common.errors import InputError
from head import Head
from model import Transformer
from tokens.tokenizer import Tokenizer
from tree import PAPER_TREE, PathTree, TreeShape


@dataclass(frozen=True)
class Setup:
    """A target, and the method that drafts for it."""

    method: str  # a name of `drafters.METHODS`
    drafting: Any  # its options, a `drafters.Drafting`
    kind: str | None  # of the checkpoint in `folder`
    folder: Path | None  # of its head or draft model
    default_tree: TreeShape
    target: Transformer
    tokenizer: Tokenizer | None
    max_seq_len: int  # most tokens of a sequence
    prepare: Callable[..., None]  # prepare(*models) puts models on the kernels, where there are any

    @property
    def grown_tree(self) -> TreeShape | PathTree:
        """The tree of a drafter that grows trees: as --tree says, else the default."""
        tree = self.default_tree if self.drafting.tree in (None, "auto") else self.drafting.tree
        return PAPER_TREE if tree == "paper" else tree

    def load_head(self) -> Head:
        """Load the head and put it on the kernels.

        By default it attends to as many tokens as it was trained on: it drafts worse on longer contexts.
        Raises InputError if it is damaged or does not fit, or if it has a sliding window and --draft-window
        is given.
        """
        head = load_head(self.folder, self.target, self.kind)
        args, window = head.args, self.drafting.window
        if any(args.windows):
            if window is not None:
                raise InputError(f"--draft-window {window}: the head in {self.folder} has windows of its own;"
                                 " leave the option out")
        else:
            if window is None:
                window = args.draft_window or args.max_seq_len
            head.attend_to(window if window < self.max_seq_len else 0)
        self.prepare(head)
        return head
