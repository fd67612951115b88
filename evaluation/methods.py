"""What is compared: plain decoding and the methods asked for, sharing one target."""
from __future__ import annotations

import sys

from tqdm import tqdm

from common.errors import InputError
from drafters import read_flags
from drafters.tree_spec import read_tree
from engine.api import Drafting, TextDecoder, load_target
from engine.runtime import Runtime
from evaluation.table import PLAIN, label
from sampling.options import Sampling
from sampling.rules import RULES


def say(line: str) -> None:
    """Print a line to stderr, above the live line. Everything but the table and the tree goes there."""
    tqdm.write(line, file=sys.stderr)


def temperatures_of(text: str) -> list[float]:
    """Temperatures of the command line. Raises InputError."""
    try:
        found = [float(part) for part in text.split(",")]
        for value in found:
            Sampling(temperature=value)
    except ValueError as e:
        raise InputError(f"--temperature {text}: {e}") from None
    return list(dict.fromkeys(value + 0.0 for value in found))  # -0 is 0


def by_method(option: str, values: list[str], methods: list[str]) -> dict[str, str]:
    """What "METHOD=VALUE", or a value alone where one method drafts, says of each method. Raises InputError.
    """
    drafting = [name for name in methods if name != PLAIN]
    found = {}
    for value in values:
        name, separator, rest = value.partition("=")
        if not separator:
            if len(drafting) != 1:
                raise InputError(f"{option} {value}: of which method? write {option} METHOD={value}")
            name, rest = drafting[0], value
        if name not in drafting or name in found:
            raise InputError(
                f"{option} {value}: {name} is " + (
                    "named twice" if name in found else f"none of {', '.join(drafting)}"
                )
            )
        found[name] = rest
    return found


def load_methods(o, methods: list[str]) -> dict[str, TextDecoder]:
    """Plain decoding and every method, sharing one target. Raises InputError if one of them cannot be."""
    drafts, trees, rules = (
        by_method(f"--{name}", getattr(o, name), methods) for name in ("draft", "tree", "accept")
    )
    flags = read_flags(o, methods)
    for name, rule in rules.items():
        if rule not in RULES:
            raise InputError(f"--accept {name}={rule}: choose from {', '.join(RULES)}")
    target = load_target(o.checkpoint, Runtime(o.device, o.dtype, o.compile, o.kernels), say)
    if target.tokenizer is None or not target.tokenizer.has_template:
        raise InputError(
            f"{o.checkpoint}: questions need a tokenizer and a chat template, this folder lacks them"
        )
    models = {PLAIN: target.decoder(max_seq_len=o.max_seq_len)}
    for name in methods:
        if name != PLAIN:
            rule = rules.get(name, "equal")
            drafting = Drafting(name, drafts.get(name), read_tree(trees.get(name)), rule, flags=flags[name])
            models[label(name, rule)] = target.decoder(drafting, max_seq_len=o.max_seq_len)
    return models
