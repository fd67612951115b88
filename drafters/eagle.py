"""EAGLE heads and MTP layers: the drafters are in `engine.draft`."""
from __future__ import annotations

from drafters.setup import Setup
from engine.draft import HeadDrafter, StaticHeadDrafter
from tree import EAGLE1_TREE, PathTree


def build(setup: Setup) -> HeadDrafter:
    """Load the head. Raises InputError if it does not fit, ValueError if the tree does not."""
    head = setup.load_head()
    given = setup.drafting.tree is not None or setup.method != "eagle"
    tree = setup.grown_tree if given else EAGLE1_TREE
    drafter = StaticHeadDrafter if isinstance(tree, PathTree) else HeadDrafter
    return drafter(head, tree, setup.drafting.coupled)
