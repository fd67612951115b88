"""What reading the layout of a draft head gives."""
from __future__ import annotations

from dataclasses import dataclass

from checkpoint.source import Entry

# Our tensor -> the source tensors that it is made of, stacked along the output dimension in this order. In
# the names {i} is the layer and {e} the expert; all experts follow each other.
NameTable = dict[str, list[str]]


@dataclass(frozen=True)
class Layout:
    """A head as read from its source.

    config: the config.json that it becomes; for Medusa and Hydra heads with a smaller vocabulary also
    `draft_ids`, a tensor. names: the table of its tensors. tensors: the source's tensors, under the source
    names of that table.
    """

    config: dict
    names: NameTable
    tensors: dict[str, Entry]
