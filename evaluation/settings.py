"""What the options of evaluate.py say of each method, read before torch is there."""
from __future__ import annotations

from common.errors import InputError
from drafters.tree_spec import read_tree
from sampling.options import RULES

PLAIN = "none"  # the method that drafts nothing


def by_method(flag: str, values: list[str], methods: list[str]) -> dict[str, str]:
    """Read the values of a flag, METHOD=VALUE each, by method.

    The method may be left out if only one method drafts. Raises InputError on a method that is none of these,
    or named twice.
    """
    drafting = [name for name in methods if name != PLAIN]
    settings = {}
    for value in values:
        name, separator, setting = value.partition("=")
        if not separator:
            if len(drafting) != 1:
                raise InputError(f"{flag} {value}: of which method? write {flag} METHOD={value}")
            name, setting = drafting[0], value
        if name in settings:
            raise InputError(f"{flag} {value}: {name} is named twice")
        if name not in drafting:
            raise InputError(f"{flag} {value}: {name} is none of {', '.join(drafting)}")
        settings[name] = setting
    return settings


def read_settings(
    methods: list[str], drafts: list[str], trees: list[str], rules: list[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """What --draft, --tree and --accept say of each method. Raises InputError, ValueError on a bad tree."""
    found = tuple(
        by_method(flag, values, methods)
        for flag, values in (("--draft", drafts), ("--tree", trees), ("--accept", rules))
    )
    for tree in found[1].values():
        read_tree(tree)
    for name, rule in found[2].items():
        if rule not in RULES:
            raise InputError(f"--accept {name}={rule}: choose from {', '.join(RULES)}")
    return found
