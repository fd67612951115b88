"""The methods of --speculate, the options that choose and shape one, and the drafter that they give.

A method is a file with `build(setup: drafters.base.Setup) -> Drafter` and an entry of METHODS. The step never
knows which one runs. This file imports no torch, so that --help is quick.
"""
from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.cli import Options
from common.errors import InputError, did_you_mean
from common.files import parse_json, read_text
from common.tree_shapes import PAPER_TREE, PathTree, TreeShape
from sampling.options import RULES

MOST = 1024  # of a method's own number: nodes, columns, n-grams
MOST_NODES = 1024  # of any tree: masks and caches grow with it
MOST_TREE = 1 << 20  # bytes of a tree's file
TARGET = "target"  # what a draft model is, as a checkpoint
AUTO = "auto"  # the method that stands for another, see `Drafting.at`
TreeSpec = TreeShape | PathTree | str | None  # numbers, paths, "auto" or "paper", nothing


class Flag(NamedTuple):
    """An option of one method. default: None for a folder, which must be given. least: of a number."""

    default: int | None
    what: str
    least: int = 1


@dataclass(frozen=True)
class Method:
    """An entry of METHODS.

    module: builds the drafter. draft: the kind of checkpoint that it drafts with and --draft names; None: it
    takes neither --draft nor --tree. grows: its head grows trees that can be measured (`engine.calibrate`),
    and takes --draft-window. flags: its own options, by name.
    """

    module: str
    what: str
    draft: str | None = None
    grows: bool = False
    flags: dict[str, Flag] = field(default_factory=dict)


METHODS: dict[str, Method | None] = {
    "none": None,
    "eagle": Method("drafters.eagle", "EAGLE-1: a head on a static tree", "eagle", True),
    "eagle2": Method("drafters.eagle", "EAGLE-2: the same head on a dynamic tree", "eagle", True),
    "eagle3": Method("drafters.eagle", "EAGLE-3: a head that reads three target layers", "eagle3", True),
    "p-eagle": Method("drafters.p_eagle", "P-EAGLE: EAGLE-3 with all levels in one pass", "p-eagle", True),
    "dflash": Method("drafters.dflash", "DFlash: a head that drafts a block in one pass", "dflash", True),
    "dspark": Method("drafters.dflash", "DSpark: the same with a Markov head", "dspark", True),
    "medusa": Method("drafters.medusa", "Medusa heads: several tokens guessed at once", "medusa"),
    "hydra": Method("drafters.hydra", "Hydra heads: the same, each guess knowing those before it", "hydra"),
    "mtp": Method("drafters.eagle", "MTP: the layer for it in the target's own checkpoint", "mtp", True),
    "draft-model": Method("drafters.draft_model", "a smaller model of that vocabulary (SpS)", TARGET),
    "lookahead": Method("drafters.lookahead", "n-grams that the target guesses while verifying", flags={
        "window": Flag(7, "columns guessed side by side"), "level": Flag(5, "tokens of an n-gram", 3),
        "guess-set": Flag(7, "n-grams tried at a time"),
    }),
    "lookup": Method("drafters.lookup", "what followed the same words earlier in the text (prompt lookup)"),
    "rest": Method("drafters.retrieval", "what followed the same words in a store of texts (REST)", flags={
        "datastore": Flag(None, "folder that python -m drafters.rest build made"),
        "draft-tokens": Flag(64, "nodes of the tree", 2),
    }),
    AUTO: Method("", "the best head in the checkpoint's folder and lookup, each where it pays", AUTO, True),
}
# The head that "auto" takes where a target has several: the first of these.
BEST_FIRST = "dspark", "eagle3", "p-eagle", "dflash", "mtp", "eagle2", "hydra", "medusa"


def methods_of(name: str) -> dict[str, Method]:
    """Return the methods that a value of --speculate joins: none, one, or two with a plus. Raises InputError.
    """
    parts = name.split("+")
    if unknown := [part for part in parts if part not in METHODS]:
        raise InputError(f"--speculate {name}: unknown{did_you_mean(unknown[0], METHODS)}; choose from"
                         f" {', '.join(METHODS)}, or two of them, such as lookup+eagle3")
    if len(parts) > 2 or (len(parts) == 2 and (parts[0] == parts[1] or {"none", AUTO} & {*parts})):
        raise InputError(f"--speculate {name}: two different methods that draft can be joined, such as"
                         " lookup+eagle3")
    return {part: METHODS[part] for part in parts if METHODS[part]}


def grows(name: str) -> bool:
    """Return whether a method, or one of two, has a head whose trees can be measured."""
    return any(method.grows for method in methods_of(name).values())


def check_window(names: list[str], window: int) -> None:
    """Raise InputError if --draft-window is negative, or is not for any of these methods."""
    if window < 0:
        raise InputError(f"--draft-window {window}: must be at least 1 token, or 0 for the whole text")
    if window and not any(map(grows, names)):
        takers = ", ".join(name for name in METHODS if grows(name))
        raise InputError(f"--draft-window {window}: is for heads with attention ({takers}); leave it out")


def _own_flags(name: str) -> dict[str, Flag]:
    return {flag: about for method in methods_of(name).values() for flag, about in method.flags.items()}


def check_flags(name: str, flags: dict) -> None:
    """Raise InputError if a method has no such flag, or if a value has another type or is out of range."""
    own = _own_flags(name)
    for flag, value in flags.items():
        if flag not in own:
            raise InputError(f"--{flag}: {name} has no such flag (it has {', '.join(own) or 'none'})")
        default, _, least = own[flag]
        kind = str if default is None else int
        if type(value) is not kind:
            raise InputError(f"--{flag} {value!r}: is not of type {kind.__name__}")
        if kind is int and not least <= value <= MOST:
            raise InputError(f"--{flag} {value}: must be {least} to {MOST:,}")


# -- the command line ---------------------------------------------------------------------------


def method_name(text: str) -> str:
    """An argparse type: a value of --speculate."""
    try:
        methods_of(text)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e).replace(f"--speculate {text}", repr(text), 1)) from None
    return text


def add_flags(parser) -> None:
    """Add the flags of all methods; None where they are not given. See `read_flags`."""
    for name, method in METHODS.items():
        for flag, (default, what, _) in (method.flags if method else {}).items():
            kind, usual = (str, "") if default is None else (int, f" (default {default})")
            help = f"{name}: {what}{usual}"
            parser.add_argument(f"--{flag}", type=kind, metavar=kind.__name__.upper(), help=help)


def read_flags(options: argparse.Namespace, names: list[str]) -> dict[str, dict]:
    """Return the given flags by method. Raises InputError on a flag of another method, or out of range."""
    flags: dict[str, dict] = {name: {} for name in names}
    for owner in METHODS:
        for flag in _own_flags(owner):
            value = getattr(options, flag.replace("-", "_"))
            users = [name for name in names if owner in name.split("+")]
            if value is not None and not users:
                raise InputError(f"--{flag} belongs to --speculate {owner}")
            for user in users if value is not None else ():
                flags[user][flag] = value
    for name, given in flags.items():
        check_flags(name, given)
    return flags


def add_window(group, options: Options, names: Callable[[argparse.Namespace], list[str]]) -> None:
    """Add --draft-window to a group of options, with its rule. names: the methods of a command line."""
    group.add_argument(
        "--draft-window", type=int, default=0, metavar="N",
        help="the head attends to, and keeps, only the last N tokens of a text; 0: all (default)",
    )
    options.judge(lambda o: check_window(names(o), o.draft_window))


def add_drafting(p: Options, default: str = "none"):
    """Add the options that say what drafts, with their rules. Returns their group. default: the method."""
    methods = "; ".join(f"{name}, {m.what}" for name, m in METHODS.items() if m)
    group = p.add_drafting(method_name, methods, default)
    add_flags(group)
    p.judge(lambda o: read_flags(o, [o.speculate]))
    add_window(group, p, lambda o: [o.speculate])
    return group


# -- trees --------------------------------------------------------------------------------------

# Rows that a GPU multiplies in about the time of one, and trees for fewer rows than the paper's.
GPU_ROWS = 192
SMALLER = tuple(TreeShape(*s) for s in ((40, 6, 8), (24, 5, 6), (16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2)))
# Instruction sets without AVX-512.
NARROW = ("avxvnni", "avx2", "neoni8mm", "neonbf16", "neondot", "neon", "portable")


def default_tree(
    device: str, quantised: bool = False, isa: str | None = None, batch: int = 1
) -> TreeShape:
    """Return the tree used where none is given and none is chosen by measurement.

    A GPU verifies 60 rows in the time of one: the paper's tree, or, for several sequences, the largest whose
    rows together are no more than GPU_ROWS. On a CPU time grows with the rows, and every level costs a pass
    of the head: few nodes and few levels (docs/how-it-works.md). Quantised weights are read sooner, so rows
    count for more. isa: the kernels' instruction set, None without kernels. Narrow ones take few rows.
    """
    if device.split(":")[0] == "cuda":
        return next((tree for tree in (PAPER_TREE, *SMALLER) if batch * tree.nodes <= GPU_ROWS), SMALLER[-1])
    if isa in NARROW:
        return TreeShape(4, 2, 2)
    return TreeShape(8, 2, 4) if quantised else TreeShape(12, 3, 4)


def read_tree(text: str | None) -> TreeSpec:
    """Parse --tree: "auto", "paper", T,D,K, or a JSON file with the paths of a static tree.

    Names stay names: the paper's tree of EAGLE is not that of Medusa. Raises InputError.
    """
    if text in (None, "auto", "paper"):
        return text
    try:
        if re.fullmatch(r"[0-9]{1,9},[0-9]{1,9},[0-9]{1,9}", text):
            return within_limits(TreeShape.parse(text))
    except ValueError as e:
        raise InputError(f"--tree {text}: {e}") from None
    try:
        paths = parse_json(read_text(text, MOST_TREE).encode(), text)
        return within_limits(PathTree(tuple(map(tuple, paths))))
    except (InputError, ValueError, TypeError) as e:
        forms = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise InputError(f"--tree {text:.200}: none of {forms} ({e})") from None


def within_limits(tree: TreeShape | PathTree) -> TreeShape | PathTree:
    """Return the tree. Raises ValueError if it has too many nodes or levels."""
    if max(tree.nodes, tree.window) > MOST_NODES:
        raise ValueError(f"tree: {tree.nodes:,} nodes on {tree.window - 1:,} levels, at most {MOST_NODES:,}")
    return tree


def with_numbers(nodes: int | None, depth: int | None, width: int | None, usual: TreeShape) -> TreeShape:
    """Return a tree with some numbers given, the others those of `usual`. Raises ValueError if impossible."""
    pairs = (nodes, usual.nodes), (depth, usual.depth), (width, usual.width)
    return within_limits(TreeShape(*(default if number is None else number for number, default in pairs)))


def _heads(checkpoint: Path, draft: str | Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the methods whose head is in a target's folder, or may be the one in `draft`, and where it is."""
    for name in BEST_FIRST:
        folder = Path(draft or checkpoint / METHODS[name].draft)
        if (folder / "config.json").is_file():
            yield name, folder


# -- drafting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """Options of drafting and acceptance.

    tree: a `TreeShape`, drafted dynamically; a `PathTree`, static; "paper"; "auto", chosen by measurement
    (`engine.autotune`); or text as --tree takes it. None takes EAGLE-1's static tree for "eagle", else
    `default_tree`. Raises InputError on bad values.
    """

    method: str = "none"  # one of METHODS, or two with a plus; "none" is plain decoding
    draft: str | Path | None = None  # folder of the head (default CHECKPOINT/KIND) or of the draft model
    tree: TreeSpec = None
    accept: str = "equal"  # one of `sampling.options.RULES`
    coupled: bool = True  # draft with the target's sampling noise
    # On our kernels, quantise a 16-bit head while loading it: it is read several times a step.
    int8: bool = True
    flags: dict = field(default_factory=dict)  # options of the method, see METHODS; others take their default
    # Prompts as ids to measure --tree auto on, where there is no tokenizer.
    tune_on: tuple[list[int], ...] = ()
    window: int = 0  # the last tokens of a text that a head attends to; 0: all. See `drafters.kept`
    chosen: bool = False  # stands for "auto": what cannot be built is left out

    def __post_init__(self):
        methods, name = methods_of(self.method), self.method
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", read_tree(self.tree))
        if self.accept not in RULES:
            raise InputError(f"--accept {self.accept}: unknown; choose from {', '.join(RULES)}")
        if self.accept != "equal" and [method.draft for method in methods.values()] != [TARGET]:
            raise InputError(f"--accept {self.accept}: is for --speculate draft-model, which can draw its"
                             f" proposals at random, not for {name}")
        if not any(method.draft for method in methods.values()):
            for option, value in (("draft", self.draft), ("tree", self.tree)):
                if value:
                    raise InputError(f"--speculate {name}: has no use for --{option}; leave it out")
        check_flags(name, self.flags)
        check_window([name], self.window)
        object.__setattr__(self, "flags", {f: a.default for f, a in _own_flags(name).items()} | self.flags)
        for flag, value in self.flags.items():
            if value is None:
                raise InputError(f"--speculate {name}: needs --{flag}, the {_own_flags(name)[flag].what}")

    @classmethod
    def of(cls, o: argparse.Namespace, **more) -> Drafting:
        """Return the drafting that a command's options ask for, see `common.cli.Options.add_drafting`.

        more: further fields.
        """
        return cls(
            o.speculate, o.draft, o.tree, getattr(o, "accept", "equal"), o.coupled, o.draft_int8,
            read_flags(o, [o.speculate])[o.speculate], window=o.draft_window, **more,
        )

    def at(self, checkpoint: Path, say: Callable[[str], None]) -> Drafting:
        """Return what this means for the target in a folder: "auto" stands for a head there, or the one that
        --draft names, joined with prompt lookup; without one for prompt lookup.

        say: called with a line about the choice. Raises InputError as `folders` does, not for "auto".
        """
        if self.method != AUTO:
            self.folders(checkpoint)
            return self
        for name, folder in _heads(checkpoint, self.draft):
            found = replace(self, method=f"lookup+{name}", chosen=True)
            try:
                found.folders(checkpoint)
            except InputError as e:
                if not self.draft:  # else it is of another kind
                    say(f"--speculate auto: {e}")
                continue
            say(f"--speculate auto: {name} drafts ({folder}), and the text where it repeats itself")
            return found
        where = f"{self.draft} holds no head" if self.draft else f"no head in {checkpoint}"
        say(f"--speculate auto: {where}; the text drafts where it repeats itself (prompt lookup)")
        return replace(self, method="lookup", draft=None, tree=None, window=0, chosen=True)

    @property
    def names_model(self) -> bool:
        """True if `draft` is a draft model, not a head: it has no default."""
        return TARGET in {method.draft for method in methods_of(self.method).values()}

    def name_unused(self, checkpoint: Path, say: Callable[[str], None]) -> None:
        """Call `say` with a line about the heads in a target's folder, if nothing drafts."""
        names = "" if methods_of(self.method) else " or ".join(name for name, _ in _heads(checkpoint))
        if names:
            say(f"{checkpoint}: has a head that is not used; --speculate {names} uses it")

    def folders(self, checkpoint: Path) -> dict[str, Path | None]:
        """Return the folder that each method drafts with, None for those without one.

        If two methods draft with a checkpoint each, --draft names the draft model, which has no default, or
        the head that both share. Raises InputError if a folder is missing or of another kind. Call it before
        the target's weights are read: it is cheap.
        """
        from checkpoint.folder import read_config  # imports torch

        methods = methods_of(self.method)
        kinds = {method.draft for method in methods.values()} - {None}
        if self.draft and len(kinds) > 1 and TARGET not in kinds:
            raise InputError(f"--speculate {self.method}: --draft {self.draft}: both take a head; convert"
                             " them into the checkpoint's folder and leave it out")
        found: dict[str, Path | None] = {}
        for name, method in methods.items():
            for flag, about in method.flags.items():
                if about.default is None and not Path(self.flags[flag]).is_dir():
                    raise InputError(f"--{flag} {self.flags[flag]}: no such folder; name the {about.what}")
            named = self.draft and (method.draft == TARGET or TARGET not in kinds)
            found[name] = None
            if method.draft == TARGET and not named:
                raise InputError(f"--speculate {name}: name a smaller converted model of the same vocabulary"
                                 " with --draft")
            if method.draft:
                folder = found[name] = Path(self.draft) if named else checkpoint / method.draft
                if method.draft != TARGET and not folder.is_dir():
                    raise InputError(f"{folder}: no {method.draft} head there; convert one into it, name it"
                                     " with --draft, or use another --speculate")
                read_config(folder, method.draft)
        return found


def build_drafter(drafting: Drafting, checkpoint: Path, max_seq_len: int, **shared):
    """Build the `drafters.base.Drafter` of a target in `checkpoint`, None for plain decoding.

    shared: further fields of `drafters.base.Setup`. Raises InputError if it cannot be built.
    """
    from drafters.base import Setup  # imports torch

    parts = []
    for name, folder in drafting.folders(checkpoint).items():
        method = METHODS[name]
        setup = Setup(
            method=name, kind=method.draft, folder=folder, tree=drafting.tree if method.draft else None,
            rule=drafting.accept, coupled=drafting.coupled, flags=drafting.flags, max_seq_len=max_seq_len,
            reach=drafting.window if drafting.window < max_seq_len else 0, **shared,
        )
        try:
            parts.append(importlib.import_module(method.module).build(setup))
        except ValueError as e:  # sizes that cannot be
            raise InputError(str(e)) from None
    if len(parts) == 2:
        return importlib.import_module("drafters.mixed").Mixed(*parts)
    return parts[0] if parts else None
