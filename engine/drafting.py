"""Options of drafting, and the drafter that they build. The methods are in `extensions.METHODS`.

This file imports no torch, so that --help is quick.
"""
from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import extensions
from common.cli import Options, is_distributed, within
from common.errors import InputError, did_you_mean
from extensions import METHODS, Method, load

MAX_TREE_NODES = 1024  # masks and caches grow with the tree
METHODS_WITH_FLAGS = {flag.method for flag in extensions.METHOD_FLAGS.values()}
TARGET = "target"  # checkpoint kind of a draft model
AUTO = "auto"  # as a method: `DraftOptions.resolve` replaces it; as a tree: sized by the cost model


def methods_of(name: str) -> dict[str, Method]:
    """Return the methods in a value of --speculate: none, one, or two joined by a plus.

    Raises InputError.
    """
    parts = name.split("+")
    if unknown := [part for part in parts if part not in METHODS]:
        raise InputError(f"--speculate {name}: unknown{did_you_mean(unknown[0], METHODS)}; choose from"
                         f" {', '.join(METHODS)}, or two of them, such as lookup+eagle3")
    if len(parts) > 2 or (len(parts) == 2 and (parts[0] == parts[1] or {"none", AUTO} & {*parts})):
        raise InputError(f"--speculate {name}: combine two methods that draft, such as lookup+eagle3")
    return {part: METHODS[part] for part in parts if METHODS[part].module}


def add_method_flags(group) -> None:
    """Add the flags of single methods, None by default."""
    for flag, (name, default, what, _) in extensions.METHOD_FLAGS.items():
        type, metavar, suffix = (str, "FILE", "") if default is None else (int, "N", f" (default {default})")
        help = f"{name}: {what}{suffix}"
        group.add_argument(f"--{flag}", type=type, metavar=metavar, help=help)
    group.add_argument("--draft-window", type=int, metavar="N",
        help="attend to only the last N tokens in the draft head; 0: all (default: its training length)")


def method_flags(args: argparse.Namespace) -> dict:
    """Return the method flags given on the command line."""
    flags = {flag: getattr(args, flag.replace("-", "_")) for flag in extensions.METHOD_FLAGS}
    return {flag: value for flag, value in flags.items() if value is not None}


def add_drafting(p: Options, default: str = "none") -> None:
    """Add the drafting options and their rules. default: of --speculate."""
    lines = [f"{name:12} {method.what}" for name, method in METHODS.items()]
    methods = "\n".join(("METHOD: one of these, or two combined by +, such as lookup+eagle3", *lines))
    group = p.add_argument_group("drafting", methods)
    add, on_off = group.add_argument, argparse.BooleanOptionalAction
    add("--speculate", default=default, metavar="METHOD",
        help=f"drafting method, see above (default {default})")
    add("-md", "--draft", metavar="DIR",
        help="draft head or draft model: folder, hub id or .gguf; implies --speculate auto (default:"
             " CHECKPOINT/METHOD; for eagle2 CHECKPOINT/eagle)")
    add("--tree", metavar="SPEC",
        help="auto: sized by the cost model at each step (default with our CPU kernels; else a T,D,k by"
             " device, such as 12,3,4); paper: the tree of the method's paper; T,D,k: nodes, depth, width; or"
             " a JSON file: a static tree")
    for name, low, what in (("nodes", 2, "T of --tree: nodes, root included (default: by device)"),
                            ("depth", 0, "D of --tree: levels after the first one (default: by device)"),
                            ("width", 1, "k of --tree: nodes expanded per level (default: by device)")):
        add(f"--tree-{name}", type=within(low, MAX_TREE_NODES), metavar="N", help=what)
    add("--coupled", action=on_off, default=True,
        help="rank draft tokens with the target's sampling noise, for higher acceptance (default); no effect"
             " at temperature 0")
    add("--draft-int8", action=on_off, default=True,
        help="quantize a 16-bit head to int8 at load, with our kernels (default)")
    add("--shard-head", action="store_true",
        help="with torchrun: shard the head or draft model over the ranks (default: replicate)")
    add_method_flags(group)
    p.reject_if(lambda args: args.shard_head and not (is_distributed() and args.speculate != "none"),
             lambda args: "--shard-head: shards the draft head over ranks; add --speculate, and start with"
                          " torchrun")
    def check_options(args: argparse.Namespace) -> None:
        sizes = [args.tree_nodes, args.tree_depth, args.tree_width]
        if sizes != [None] * 3:
            if args.tree:
                raise InputError(f"--tree {args.tree}: leave out --tree-nodes, --tree-depth and --tree-width")
            args.tree = sizes
        if args.draft and args.speculate == "none":
            args.speculate = AUTO
        DraftOptions.from_options(args)

    p.add_rule(check_options)


def read_tree(text: str) -> Any:
    """Parse --tree: "auto", "paper", T,D,K, or a JSON file with the paths of a static tree.

    "auto" and "paper" are returned unchanged: the paper's tree depends on the method. Raises InputError.
    """
    if text in (AUTO, "paper"):
        return text
    if not re.fullmatch(r"[0-9]{1,9},[0-9]{1,9},[0-9]{1,9}", text):
        return check_size(load(extensions.TREE_FILES)(text))
    return tree_from_sizes([*map(int, text.split(","))])



def tree_from_sizes(sizes: list[int]):
    """Return the `TreeShape` of [T, D, k]. Raises InputError if it is invalid or too large."""
    from tree import TreeShape  # imports torch

    return check_size(TreeShape(*sizes))


def check_size(tree):
    """Return the tree. Raises InputError if it has too many nodes or levels."""
    if max(tree.nodes, tree.max_commit) > MAX_TREE_NODES:
        size = f"{tree.nodes:,} nodes on {tree.max_commit - 1:,} levels"
        raise InputError(f"--tree: {size}; at most {MAX_TREE_NODES:,}")
    return tree


@dataclass(frozen=True)
class DraftOptions:
    """Options of drafting. Raises InputError on invalid values.

    method: a name in `extensions.METHODS`, or two with a plus; "none" is plain decoding.
    draft: folder of the head (default CHECKPOINT/KIND) or of the draft model.
    tree: a `TreeShape`, drafted dynamically; a static tree (`drafters.static`); "paper"; "auto", sized by the
    scheduler; a string as for --tree; or [T, D, k], with None for default sizes. None: the default tree.
    coupled: draft with the target's sampling noise.
    int8: on our kernels, quantize a 16-bit head at load: each step reads it several times.
    flags: by name (`extensions.METHOD_FLAGS`); missing ones take their default.
    window: number of last tokens that a head attends to; 0: all; None: see `DrafterSetup.load_head`.
    optional: if the drafter cannot be built, fall back to prompt lookup instead of raising; set by "auto".
    """

    method: str = "none"
    draft: str | Path | None = None
    tree: Any = None
    coupled: bool = True
    int8: bool = True
    flags: dict = field(default_factory=dict)
    window: int | None = None
    optional: bool = False

    def __post_init__(self):
        methods = methods_of(self.method)
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", read_tree(self.tree))
        elif isinstance(self.tree, list) and None not in self.tree:
            object.__setattr__(self, "tree", tree_from_sizes(self.tree))
        if not any(method.draft for method in methods.values()):
            for option, value in (("draft", self.draft), ("tree", self.tree)):
                if value:
                    raise InputError(f"--speculate {self.method}: does not take --{option}; leave it out or"
                                     " choose another method")
        if self.flags or self.window is not None or METHODS_WITH_FLAGS & {*methods}:
            object.__setattr__(self, "flags", load(extensions.CHECK_METHOD_FLAGS)(self, methods))

    @classmethod
    def from_options(cls, args: argparse.Namespace) -> DraftOptions:
        """Return the drafting options of a command line, see `add_drafting`."""
        return cls(args.speculate, args.draft, args.tree, args.coupled, args.draft_int8, method_flags(args),
                   args.draft_window)

    def resolve(self, checkpoint: Path, log: Callable[[str], None]) -> DraftOptions:
        """Return the options with a concrete method: "auto" is replaced by the methods that it chooses.

        log: called with a line about the choice. Raises InputError as `folders` does.
        """
        if self.method == AUTO:
            return load(extensions.CHOOSE_DRAFTER)(self, checkpoint, log)
        self.folders(checkpoint)
        return self

    @property
    def uses_draft_model(self) -> bool:
        """True if `draft` is the folder of a draft model, which has no default, and not of a head."""
        return TARGET in {method.draft for method in methods_of(self.method).values()}

    def folders(self, checkpoint: Path) -> dict[str, Path | None]:
        """Return the folder that each method drafts with, None for those without one.

        If both of two methods need a checkpoint, --draft is the draft model, which has no default; the head
        is in the target's folder. Raises InputError if a folder is missing or its checkpoint of the wrong
        kind. It reads configs only: call it before loading the target's weights.
        """
        from checkpoint.load import read_config  # imports torch

        methods = methods_of(self.method)
        kinds = {method.draft for method in methods.values()} - {None}
        if self.draft and len(kinds) > 1 and TARGET not in kinds:
            raise InputError(f"--speculate {self.method}: --draft {self.draft}: both methods need a head; put"
                             " both into the checkpoint's folder and leave out --draft")
        folders: dict[str, Path | None] = {}
        for name, method in methods.items():
            explicit = self.draft and (method.draft == TARGET or TARGET not in kinds)
            folders[name] = None
            if method.draft == TARGET and not explicit:
                raise InputError(f"--speculate {name}: pass a smaller model with the same vocabulary as"
                                 " --draft")
            if method.draft:
                folder = folders[name] = Path(self.draft) if explicit else checkpoint / method.draft
                if method.draft != TARGET and not folder.is_dir():
                    available = [m for m, x in METHODS.items() if x.draft and (checkpoint / x.draft).is_dir()]
                    advice = "convert one into it, pass its folder as --draft, or use another --speculate"
                    if available:
                        advice = f"use the head in {checkpoint} with --speculate {' or '.join(available)}"
                    raise InputError(f"{folder}: no {method.draft} head there; {advice}")
                read_config(folder, method.draft)
        return folders


@dataclass(frozen=True)
class DrafterSetup:
    """The inputs for building a drafter.

    method: a name in `extensions.METHODS`. options: how to draft. kind, folder: of the checkpoint of the
    head or draft model; None without one. max_seq_len: maximum number of tokens of a sequence.
    prepare(*models): see `Target.prepare_models`.
    """

    method: str
    options: DraftOptions
    kind: str | None
    folder: Path | None
    default_tree: Any
    target: Any
    tokenizer: Any
    max_seq_len: int
    prepare: Callable[..., None]

    @property
    def tree(self) -> Any:
        """The tree to draft: --tree or the default. Raises InputError on invalid sizes."""
        from tree import PAPER_TREE

        tree, default = self.options.tree, self.default_tree
        if isinstance(tree, list):
            defaults = default.nodes, default.depth, default.width
            return tree_from_sizes([b if a is None else a for a, b in zip(tree, defaults)])
        return PAPER_TREE if tree == "paper" else default if tree in (None, AUTO) else tree

    def load_head(self):
        """Load the head and prepare it for the backend.

        Its default sliding window is its training length: attending to more tokens lowers acceptance.
        Raises InputError if it is damaged or does not fit, or if it has a sliding window and --draft-window
        is given.
        """
        from checkpoint.load import load_head

        head, window = load_head(self.folder, self.target, self.kind), self.options.window
        if any(head.args.windows):
            if window is not None:
                raise InputError(f"--draft-window {window}: the head in {self.folder} sets its own sliding"
                                 " windows; leave the option out")
        else:
            if window is None:
                window = head.args.draft_window or head.args.max_seq_len
            head.set_sliding_window(window if window < self.max_seq_len else 0)
        self.prepare(head)
        return head


def build_drafter(drafting: DraftOptions, checkpoint: Path, max_seq_len: int, **setup):
    """Build the `engine.draft.Drafter` of a target in `checkpoint`, None for plain decoding.

    setup: further fields of `DrafterSetup`. Raises InputError if it cannot be built.
    """
    parts = []
    for name, folder in drafting.folders(checkpoint).items():
        arguments = name, drafting, METHODS[name].draft, folder
        part = load(METHODS[name].module)(DrafterSetup(*arguments, max_seq_len=max_seq_len, **setup))
        part.method = name
        parts.append(part)
    if len(parts) < 2:
        return parts[0] if parts else None
    return load(extensions.JOIN)(*parts)
