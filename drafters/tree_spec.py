"""What --tree says, and the tree used when it says nothing.

A specification keeps its name ("auto", "paper") until the drafter resolves it: the paper's tree of EAGLE is
not that of Medusa.
"""
from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from common.errors import InputError
from common.files import parse_json, read_text
from common.schema import Schema, whole
from common.tree_shapes import PAPER_TREE, PathTree, TreeShape

# Instruction sets without AVX-512.
NARROW = ("avxvnni", "avx2", "neoni8mm", "neonbf16", "neondot", "neon", "portable")
MOST_NODES = 1024  # of any tree: masks and caches grow with it
MOST_TREE = 1 << 20  # bytes of a file
_Path = Annotated[list[whole(0, 9999)], Field(min_length=1, max_length=64)]
# Of a static tree: ranks of a node and of those above it.
PATHS = Schema(Annotated[list[_Path], Field(min_length=1, max_length=4096)])
TreeSpec = TreeShape | PathTree | str | None  # numbers, paths, "auto" or "paper", nothing


# What a GPU multiplies in about the time of one row, and trees for fewer rows than the paper's.
GPU_ROWS = 192
SMALLER = tuple(TreeShape(*s) for s in ((40, 6, 8), (24, 5, 6), (16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2)))


def default_tree(
    device: str, quantised: bool = False, isa: str | None = None, batch: int = 1
) -> TreeSpec:
    """The tree used when none is asked for, and none is chosen by measurement.

    A GPU verifies 60 rows in the time of one: the paper's tree, or, where several texts are decoded at once,
    the largest one whose rows together are no more than GPU_ROWS. A CPU does not: time grows with the rows,
    and every draft level costs a pass of the head, so a CPU wants few nodes and few levels
    (docs/how-it-works.md). Quantised weights are read sooner, and rows count for more. isa: the kernels'
    instruction set, None without kernels; where it is narrow, four rows are as many as cost little.
    """
    if device.split(":")[0] == "cuda":
        if batch * PAPER_TREE.nodes <= GPU_ROWS:
            return "paper"
        return next((tree for tree in SMALLER if batch * tree.nodes <= GPU_ROWS), SMALLER[-1])
    if isa in NARROW:
        return TreeShape(4, 2, 2)
    return TreeShape(8, 2, 4) if quantised else TreeShape(12, 3, 4)


def read_tree(text: str | None) -> TreeSpec:
    """Parse --tree: a name as it is, nodes,depth,width, or a JSON file with the paths of a static tree.

    Raises InputError on anything else, ValueError on an impossible tree.
    """
    if text in (None, "auto", "paper"):
        return text
    if re.fullmatch(r"[0-9]+,[0-9]+,[0-9]+", text):
        if len(text) > 30:
            raise InputError(f"--tree {text:.30}...: numbers of so many digits; at most {MOST_NODES:,} nodes")
        return within_limits(TreeShape.parse(text))
    try:
        paths = parse_json(read_text(text, MOST_TREE).encode(), text)
        PATHS.check(paths, "paths")
        return within_limits(PathTree(tuple(map(tuple, paths))))
    except (InputError, ValueError) as e:
        forms = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise InputError(f"--tree {text:.200}: none of {forms} ({e})") from None


def within_limits(tree: TreeShape | PathTree) -> TreeShape | PathTree:
    """The tree. Raises ValueError if it has too many nodes or levels."""
    if max(tree.nodes, tree.window) > MOST_NODES:
        raise ValueError(f"tree: {tree.nodes:,} nodes on {tree.window - 1:,} levels, at most {MOST_NODES:,}")
    return tree


def with_numbers(nodes: int | None, depth: int | None, width: int | None, default: TreeSpec) -> TreeShape:
    """A tree with some numbers given, the others from the default. Raises ValueError on an impossible one."""
    usual = eagle_tree(default)
    pairs = (nodes, usual.nodes), (depth, usual.depth), (width, usual.width)
    return within_limits(TreeShape(*(default if number is None else number for number, default in pairs)))


def eagle_tree(spec: TreeShape | PathTree | str) -> TreeShape | PathTree:
    """The tree that a specification (not "auto") names for a drafter that grows its tree."""
    return PAPER_TREE if spec == "paper" else spec
