"""The methods of --speculate, the options that choose and shape one, and the drafter that they give.

A method is an entry of METHODS, which names a file with `build(setup: drafters.setup.Setup) -> Drafter`.
Similar methods share a file. The step never knows which one runs. This file imports no torch, so that --help
is quick.
"""
from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.cli import Options, several
from common.errors import InputError, did_you_mean
from common.files import parse_json, read_text
from common.tree_shapes import PathTree, TreeShape

MAX_TREE_NODES = 1024  # masks and caches grow with the tree; also the limit of a method's own options
TARGET = "target"  # what a draft model is, as a checkpoint
AUTO = "auto"  # the method that stands for another, see `Drafting.at`
TreeSpec = TreeShape | PathTree | str | None  # numbers, paths, "auto" or "paper", nothing


class Flag(NamedTuple):
    """An option of one method. default: None for a file, which must be given. minimum: of a number."""

    method: str
    default: int | None
    what: str
    minimum: int = 1


@dataclass(frozen=True)
class Method:
    """An entry of METHODS.

    module: builds the drafter. draft: the kind of checkpoint that it drafts with and --draft names; None: it
    takes neither --draft nor --tree. grows: its head grows trees of any size, and takes --draft-window.
    """

    module: str
    what: str
    draft: str | None = None
    grows: bool = False


METHODS: dict[str, Method | None] = {
    "none": None,
    "eagle": Method("drafters.eagle", "EAGLE-1: a head on a static tree", "eagle", True),
    "eagle2": Method("drafters.eagle", "EAGLE-2: the same head on a dynamic tree", "eagle", True),
    "eagle3": Method("drafters.eagle", "EAGLE-3: a head that reads three target layers", "eagle3", True),
    "p-eagle": Method("drafters.block", "P-EAGLE: EAGLE-3 with all levels in one pass", "p-eagle", True),
    "dflash": Method("drafters.block", "DFlash: a head that drafts a block in one pass", "dflash", True),
    "dspark": Method("drafters.block", "DSpark: the same with a Markov head", "dspark", True),
    "medusa": Method("drafters.medusa", "Medusa heads: each predicts one of the next tokens", "medusa"),
    "hydra": Method("drafters.medusa", "Hydra heads: the same, each conditioned on the ones before", "hydra"),
    "mtp": Method("drafters.eagle", "MTP: the layer for it in the target's own checkpoint", "mtp", True),
    "draft-model": Method("drafters.draft_model", "a smaller model of that vocabulary (SpS)", TARGET),
    "lookahead": Method("drafters.lookahead", "n-grams that the target predicts while verifying"),
    "lookup": Method("drafters.ngram", "what followed the same words earlier in the text (prompt lookup)"),
    "suffix": Method("drafters.ngram", "the same, also in earlier requests (suffix decoding)"),
    "rest": Method("drafters.ngram", "the same, also in a file of tokens (REST)"),
    AUTO: Method("", "the best head in the checkpoint's folder, joined with prompt lookup", AUTO, True),
}
FLAGS = {  # the own options of methods
    "window": Flag("lookahead", 7, "columns drafted in parallel"),
    "level": Flag("lookahead", 5, "tokens of an n-gram", 3),
    "guess-set": Flag("lookahead", 7, "n-grams tried at a time"),
    "datastore": Flag("rest", None, "file that python -m drafters.ngram made"),
}
# "auto" uses the first of these that the target has.
HEAD_PRIORITY = "dspark", "eagle3", "p-eagle", "dflash", "mtp", "eagle2", "hydra", "medusa"


def methods_of(name: str) -> dict[str, Method]:
    """Return the methods that a value of --speculate joins: none, one, or two with a plus. Raises InputError.
    """
    parts = name.split("+")
    if unknown := [part for part in parts if part not in METHODS]:
        raise InputError(f"--speculate {name}: unknown{did_you_mean(unknown[0], METHODS)}; choose from"
                         f" {', '.join(METHODS)}, or two of them, such as lookup+eagle3")
    if len(parts) > 2 or (len(parts) == 2 and (parts[0] == parts[1] or {"none", AUTO} & {*parts})):
        raise InputError(f"--speculate {name}: join two methods that draft, such as lookup+eagle3")
    return {part: METHODS[part] for part in parts if METHODS[part]}


def grows(name: str) -> bool:
    """Return whether a method, or one of two, has a head that grows trees of any size."""
    return any(method.grows for method in methods_of(name).values())


def flags_of(name: str) -> dict[str, Flag]:
    """Return the own flags of a method, or of two."""
    return {flag: about for flag, about in FLAGS.items() if about.method in methods_of(name)}


# -- the command line ---------------------------------------------------------------------------


def add_flags(group) -> None:
    """Add the flags that only some methods take, None or 0 where they are not given."""
    for flag, (name, default, what, _) in FLAGS.items():
        type_, suffix = (str, "") if default is None else (int, f" (default {default})")
        help = f"{name}: {what}{suffix}"
        group.add_argument(f"--{flag}", type=type_, metavar=type_.__name__.upper(), help=help)
    group.add_argument(
        "--draft-window", type=int, metavar="N",
        help="the head attends to the last N tokens of a text only; 0: to all (default: as many as it was"
             " trained on)",
    )


def given_flags(o: argparse.Namespace) -> dict:
    """Return the own flags of methods that a command line gives."""
    return {flag: x for flag in FLAGS if (x := getattr(o, flag.replace("-", "_"))) is not None}


def add_drafting(p: Options, default: str = "none"):
    """Add the options that say what drafts, with their rules. Returns their group. default: the method."""
    lines = [f"{name:12} {method.what if method else 'plain decoding'}" for name, method in METHODS.items()]
    methods = "\n".join(("METHOD is one of these, or two with a plus, such as lookup+eagle3:", *lines))
    group = p.add_argument_group("drafting", methods)
    add, on_off = group.add_argument, argparse.BooleanOptionalAction
    add("--speculate", default=default, metavar="METHOD",
        help=f"what drafts, such as auto, eagle3 or none (default {default}); see below for all")
    add("--draft",
        help="folder of the head (default CHECKPOINT/KIND, eagle for EAGLE-2 too) or draft model")
    add("--tree", metavar="SPEC",
        help="auto (what reduces latency; the default of EAGLE-2 and 3 on a CPU), paper, T,D,K, or a JSON"
             " file of paths: a static tree")
    add("--coupled", action=on_off, default=True, help="draft with the target's sampling noise")
    add("--draft-int8", action=on_off, default=True, help="on our kernels, quantise a 16-bit head at loading")
    add("--shard-head", action="store_true",
        help="with torchrun: shard the head, or the draft model, over the ranks too; else each has it whole")
    add_flags(group)
    p.refuse(lambda o: o.shard_head and not (several() and o.speculate != "none"),
             lambda o: "--shard-head: deals what drafts among ranks; add --speculate, and start with"
                       " torchrun")
    p.judge(Drafting.of)
    return group


# -- trees --------------------------------------------------------------------------------------

MAX_GPU_TOKENS = 192  # tokens of a pass that a large GPU verifies in about the time of one
GPU_TREES = tuple(TreeShape(*s) for s in ((16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2)))
ISAS_WITHOUT_AVX512 = ("avxvnni", "avx2", "neoni8mm", "neonbf16", "neondot", "neon", "portable")


def default_tree(
    device: str, quantised: bool = False, isa: str | None = None, batch: int = 1
) -> TreeShape:
    """Return the tree used where none is given and none is chosen at each step.

    On a GPU it is the largest of GPU_TREES with which all sequences together verify at most MAX_GPU_TOKENS;
    small GPUs do not verify the paper's 60 tokens in the time of one. On a CPU time grows with the tokens,
    and every level costs a pass of the head: few nodes and few levels (docs/how-it-works.md). Quantised
    weights are read sooner, so tokens count for more. isa: the kernels' instruction set, None without them.
    """
    if device.split(":")[0] == "cuda":
        return next((tree for tree in GPU_TREES if batch * tree.nodes <= MAX_GPU_TOKENS), GPU_TREES[-1])
    if isa in ISAS_WITHOUT_AVX512:
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
            return check_size(TreeShape.parse(text))
    except ValueError as e:
        raise InputError(f"--tree {text}: {e}") from None
    try:
        paths = parse_json(read_text(text), text)
        return check_size(PathTree(tuple(map(tuple, paths))))
    except (InputError, ValueError, TypeError) as e:
        forms = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise InputError(f"--tree {text:.200}: none of {forms} ({e})") from None


def check_size(tree: TreeShape | PathTree) -> TreeShape | PathTree:
    """Return the tree. Raises ValueError if it has too many nodes or levels."""
    if max(tree.nodes, tree.window) > MAX_TREE_NODES:
        size = f"{tree.nodes:,} nodes on {tree.window - 1:,} levels"
        raise ValueError(f"tree: {size}, at most {MAX_TREE_NODES:,}")
    return tree


def with_numbers(nodes: int | None, depth: int | None, width: int | None, default: TreeShape) -> TreeShape:
    """Return a tree with some numbers given, the others from `default`. Raises ValueError if impossible."""
    pairs = (nodes, default.nodes), (depth, default.depth), (width, default.width)
    return check_size(TreeShape(*(other if number is None else number for number, other in pairs)))


def _heads(checkpoint: Path, draft: str | Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the methods whose head is in a target's folder, or may be the one in `draft`, and where it is."""
    for name in HEAD_PRIORITY:
        folder = Path(draft or checkpoint / METHODS[name].draft)
        if (folder / "config.json").is_file():
            yield name, folder


# -- drafting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """Options of drafting.

    tree: a `TreeShape`, drafted dynamically; a `PathTree`, static; "paper"; "auto", sized to reduce latency
    (`schedulers.cost_model`); or text as --tree takes it. None takes EAGLE-1's static tree for "eagle", else
    `default_tree`. Raises InputError on bad values.
    """

    method: str = "none"  # one of METHODS, or two with a plus; "none" is plain decoding
    draft: str | Path | None = None  # folder of the head (default CHECKPOINT/KIND) or of the draft model
    tree: TreeSpec = None
    coupled: bool = True  # draft with the target's sampling noise
    # On our kernels, quantise a 16-bit head while loading it: it is read several times a step.
    int8: bool = True
    flags: dict = field(default_factory=dict)  # options of the method, see FLAGS; others take their default
    # The last tokens of a text that a head attends to; 0: all; None: see `Setup.load_head`.
    window: int | None = None
    chosen: bool = False  # stands for "auto": what cannot be built is left out

    def __post_init__(self):
        name, methods = self.method, methods_of(self.method)
        if isinstance(self.tree, str):
            object.__setattr__(self, "tree", read_tree(self.tree))
        if not any(method.draft for method in methods.values()):
            for option, value in (("draft", self.draft), ("tree", self.tree)):
                if value:
                    raise InputError(f"--speculate {name}: has no use for --{option}; leave it out or name"
                                     " another method")
        if self.window is not None and (type(self.window) is not int or self.window < 0):
            raise InputError(f"--draft-window {self.window!r}: must be at least 1 token, or 0 for all")
        if self.window is not None and not grows(name):
            takers = ", ".join(filter(grows, METHODS))
            raise InputError(f"--draft-window {self.window}: is for heads with attention ({takers}); leave it"
                             " out")
        object.__setattr__(self, "flags", self._all_flags())

    def _all_flags(self) -> dict:
        """Return the method's flags, those that are not given by their defaults. Raises InputError."""
        own = flags_of(self.method)
        flags = {flag: about.default for flag, about in own.items()} | self.flags
        for flag, value in flags.items():
            if flag not in own:
                owner = FLAGS[flag].method if flag in FLAGS else "no method"
                raise InputError(f"--{flag} belongs to --speculate {owner}; leave it out")
            _, default, what, minimum = own[flag]
            if value is None:
                raise InputError(f"--speculate {self.method}: needs --{flag}, the {what}")
            if not (default is None or (type(value) is int and minimum <= value <= MAX_TREE_NODES)):
                raise InputError(f"--{flag} {value!r}: must be {minimum} to {MAX_TREE_NODES:,}")
        return flags

    @classmethod
    def of(cls, o: argparse.Namespace) -> Drafting:
        """Return the drafting that a command's options ask for, see `add_drafting`."""
        return cls(
            o.speculate, o.draft, o.tree, o.coupled, o.draft_int8, given_flags(o), window=o.draft_window
        )

    def at(self, checkpoint: Path, log: Callable[[str], None]) -> Drafting:
        """Return what this means for the target in a folder: "auto" stands for a head there, or the one that
        --draft names, joined with prompt lookup; without one for prompt lookup.

        log: called with a line about the choice. Raises InputError as `folders` does; for "auto" only if
        --draft names no head.
        """
        if self.method != AUTO:
            self.folders(checkpoint)
            return self
        for name, folder in _heads(checkpoint, self.draft):
            found = replace(self, method=f"lookup+{name}", chosen=not self.draft)
            try:
                found.folders(checkpoint)
            except InputError as e:
                if not self.draft:  # else it is of another kind
                    log(f"--speculate auto: {e}")
                continue
            log(f"--speculate auto: {name} drafts ({folder}), and the text where it repeats itself")
            return found
        if self.draft:
            raise InputError(f"--speculate auto: --draft {self.draft}: is no head; name one, or"
                             " --speculate draft-model for a smaller model")
        given = (("--tree", self.tree), ("--draft-window", self.window))
        unused = "".join(f"; {flag} is for heads" for flag, value in given if value is not None)
        log(f"--speculate auto: no usable head in {checkpoint}; the text drafts where it repeats itself"
            f" (prompt lookup){unused}")
        return replace(self, method="lookup", tree=None, window=None, chosen=True)

    @property
    def names_model(self) -> bool:
        """True if `draft` is a draft model, not a head: it has no default."""
        return TARGET in {method.draft for method in methods_of(self.method).values()}

    def name_unused(self, checkpoint: Path, log: Callable[[str], None]) -> None:
        """Call `log` with a line about the heads in a target's folder, if nothing drafts."""
        names = "" if methods_of(self.method) else " or ".join(name for name, _ in _heads(checkpoint))
        if names:
            log(f"{checkpoint}: has a head that is not used; --speculate {names} uses it")

    def folders(self, checkpoint: Path) -> dict[str, Path | None]:
        """Return the folder that each method drafts with, None for those without one.

        If two methods draft with a checkpoint each, --draft names the draft model, which has no default, or
        the head that both share. Raises InputError if a folder is missing or of another kind. Call it before
        the target's weights are read: it is cheap.
        """
        from checkpoint.load import read_config  # imports torch

        methods = methods_of(self.method)
        kinds = {method.draft for method in methods.values()} - {None}
        if self.draft and len(kinds) > 1 and TARGET not in kinds:
            raise InputError(f"--speculate {self.method}: --draft {self.draft}: both take a head; convert"
                             " them into the checkpoint's folder and leave it out")
        for flag, value in self.flags.items():
            if FLAGS[flag].default is None and not Path(value).is_file():
                raise InputError(f"--{flag} {value}: no such file; name the {FLAGS[flag].what}")
        found: dict[str, Path | None] = {}
        for name, method in methods.items():
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
    """Build the `engine.draft.Drafter` of a target in `checkpoint`, None for plain decoding.

    shared: further fields of `drafters.setup.Setup`. Raises InputError if it cannot be built.
    """
    from drafters.setup import Setup  # imports torch, as does the next

    parts = []
    for name, folder in drafting.folders(checkpoint).items():
        method = METHODS[name]
        setup = Setup(name, drafting, method.draft, folder, max_seq_len=max_seq_len, **shared)
        try:
            part = importlib.import_module(method.module).build(setup)
        except ValueError as e:  # sizes that cannot be
            raise InputError(str(e)) from None
        part.method = name
        parts.append(part)
    if len(parts) < 2:
        return parts[0] if parts else None
    from drafters.mixed import Mixed

    return Mixed(*parts)
