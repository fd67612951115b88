"""Ways to propose a tree. All have the face in `drafters.base`; the step never knows which one runs.

A drafter is a file with `build(request) -> Drafter` and a line in METHODS. This file imports no torch, so
that --help is instant.
"""
from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.cli import Options
from common.errors import InputError

MOST = 1024  # of the numbers of a method's own: nodes, columns, n-grams

class Flag(NamedTuple):
    """An option of a method's own: its default, what it says, and the least of a number."""

    default: int | float | str | None
    what: str
    least: int = 1


@dataclass(frozen=True)
class Method:
    """What a name of `--speculate` stands for.

    module: builds the drafter. what: says what it is. flags: of its own, by name. headless: it
    takes no --draft and no --tree. grows: its head grows trees that can be measured, see
    `engine.calibrating`, and takes --draft-window. early: MODULE:FUNCTION, which judges its flags and what
    they name for a target of so many token ids (None: not known yet), without torch.
    """

    module: str
    what: str
    flags: dict[str, Flag] = field(default_factory=dict)
    headless: bool = False
    grows: bool = False
    early: str | None = None


METHODS: dict[str, Method | None] = {
    "none": None,
    "eagle": Method("drafters.eagle", "EAGLE-1: a head on a static tree", grows=True),
    "eagle2": Method("drafters.eagle", "EAGLE-2: the same head on a dynamic tree", grows=True),
    "eagle3": Method("drafters.eagle", "EAGLE-3: a head that reads three of the target's layers", grows=True),
    "p-eagle": Method(
        "drafters.p_eagle", "P-EAGLE: an EAGLE-3 head that drafts all levels in one pass", grows=True
    ),
    "dflash": Method(
        "drafters.dflash", "DFlash: a head that drafts a block in one pass, as a tree", grows=True
    ),
    "dspark": Method(
        "drafters.dspark", "DSpark: the same with a Markov head, so that branches differ", grows=True
    ),
    "medusa": Method("drafters.medusa", "Medusa heads: several tokens guessed at once"),
    "hydra": Method("drafters.hydra", "Hydra heads: the same, each guess knowing those before it"),
    "draft-model": Method("drafters.draft_model", "a smaller model of the same vocabulary, in --draft (SpS)"),
    "lookahead": Method("drafters.lookahead", "n-grams that the target guesses while verifying", {
        "window": Flag(7, "columns guessed side by side"),
        "level": Flag(5, "tokens of an n-gram", 3),
        "guess-set": Flag(7, "n-grams tried at a time"),
    }, headless=True, early="drafters.lookahead_sizes:judge_rows"),
    "lookup": Method(
        "drafters.lookup", "what followed the same words earlier in the text (prompt lookup)", headless=True
    ),
    "rest": Method("drafters.retrieval", "what followed the same words in a collection of texts (REST)", {
        "datastore": Flag(None, "folder that python -m drafters.rest build made"),
        "draft-tokens": Flag(64, "nodes of the tree", 2),
    }, headless=True, early="drafters.rest_store:find_store"),
}


def known(name: str) -> str:
    """The name of a method, or of two with a plus. Raises InputError, with all of them, if it is neither."""
    parts = name.split("+")
    for part in parts:
        if part not in METHODS:
            raise InputError(
                f"--speculate {name}: unknown; choose from {', '.join(METHODS)}, or two of them, such as"
                " lookup+eagle3"
            )
    if len(parts) > 2 or (len(parts) == 2 and (parts[0] == parts[1] or "none" in parts)):
        raise InputError(
            f"--speculate {name}: two different methods that draft can be joined, such as lookup+eagle3"
        )
    return name


def _methods(name: str) -> list[Method]:
    """The methods that a name stands for."""
    return [method for method in (METHODS[part] for part in known(name).split("+")) if method]


def grows(name: str) -> bool:
    """Whether a method, or one of two, has a head whose trees can be measured."""
    return any(method.grows for method in _methods(name))


def headless(name: str) -> bool:
    """Whether a method, or both of two, take neither --draft nor --tree."""
    return all(method.headless for method in _methods(name)) and name != "none"


def check_window(names: list[str], window: int) -> None:
    """Raise InputError if a value of --draft-window is none, or is for none of these methods."""
    if window < 0:
        raise InputError(f"--draft-window {window}: must be at least 1 token, or 0 for the whole text")
    if window and not any(map(grows, names)):
        takers = ", ".join(name for name in METHODS if name != "none" and grows(name))
        raise InputError(f"--draft-window {window}: is for heads with attention ({takers}); leave it out")


def add_window(group, options: Options, names: Callable[[argparse.Namespace], list[str]]) -> None:
    """Add --draft-window to a group of options, and its rule. names: the methods of a command line."""
    group.add_argument(
        "--draft-window", type=int, default=0, metavar="N",
        help="the head attends to, and keeps, only the last N tokens of a text; 0: all (default)",
    )
    options.judge(lambda o: check_window(names(o), o.draft_window))


def build_drafter(request):
    """The drafter of a `drafters.request.Request`, or None for plain decoding.

    Raises InputError if it cannot be.
    """
    names = known(request.method).split("+")
    if names == ["none"]:
        if request.rule != "equal":
            raise InputError(f"--accept {request.rule}: plain decoding drafts nothing to accept")
        return None
    if request.rule == "residual" and request.method != "draft-model":
        raise InputError(
            "--accept residual: is for --speculate draft-model, which can draw its proposals at random"
        )
    def build(part):
        return importlib.import_module(METHODS[part.method].module).build(part)

    try:
        if len(names) == 2:
            headless = {name for name in names if METHODS[name].headless}
            return importlib.import_module("drafters.mixed").build_mixed(request, names, headless, build)
        drafter = build(request)
    except ValueError as e:  # sizes that cannot be
        raise InputError(str(e)) from None
    drafter.rule = request.rule
    return drafter


def default_flags(name: str) -> dict:
    """The flags of a method's own with their defaults."""
    return {name: flag.default for method in _methods(name) for name, flag in method.flags.items()}


def flag_type(default) -> type:
    """The type of a flag's values, told by its default: one that has none is text."""
    return str if default is None else type(default)


def method_name(text: str) -> str:
    """An argparse type: a value of --speculate."""
    try:
        return known(text)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e).replace(f"--speculate {text}", repr(text), 1)) from None


def check_flags(name: str, flags: dict) -> None:
    """Raise InputError if a method has no such flag, or a value is of another type."""
    defaults = default_flags(name)
    for flag, value in flags.items():
        if flag not in defaults:
            own = ", ".join(defaults) or "none"
            raise InputError(f"flag {flag!r}: {name} has no such flag (it has {own})")
        kind = flag_type(defaults[flag])
        if value is not None and not isinstance(value, kind):
            raise InputError(f"flag {flag!r}: {value!r} is not of type {kind.__name__}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all methods; None where they are not given."""
    for name, method in METHODS.items():
        for flag, (default, what, _) in (method.flags if method else {}).items():
            kind = flag_type(default)
            shown = "" if default is None else f" (default {default})"
            metavar = kind.__name__.upper()
            parser.add_argument(f"--{flag}", type=kind, metavar=metavar, help=f"{name}: {what}{shown}")


def check_numbers(options: Options) -> None:
    """Add the rules of `add_flags`: no number of theirs is below its least or above MOST."""
    for method in METHODS.values():
        for flag, (default, _, least) in (method.flags if method else {}).items():
            if isinstance(default, int):
                options.within(f"--{flag}", least, MOST)


def read_flags(options: argparse.Namespace, methods: list[str]) -> dict[str, dict]:
    """The flags of each method with their values. Raises InputError on a flag of another method."""
    flags = {name: default_flags(name) for name in methods}
    for name in METHODS:
        for flag in default_flags(name):
            value = getattr(options, flag.replace("-", "_"))
            if value is None:
                continue
            users = [method for method in methods if name in method.split("+")]
            if not users:
                raise InputError(f"--{flag} belongs to --speculate {name}")
            for user in users:
                flags[user][flag] = value
    return flags
