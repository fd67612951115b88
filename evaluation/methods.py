"""Build and run the methods that are compared: plain decoding and those of --speculate."""
from __future__ import annotations

import argparse
from typing import NamedTuple

from checkpoint.folder import weights_fingerprint
from common.errors import InputError
from common.writing import digest
from drafters.options import flags_of, is_resizable
from engine.drafting import DraftOptions, method_flags
from engine.engine import Engine
from engine.request import encode
from engine.sampling import Sampling
from engine.target import Target
from evaluation.answers import PLAIN, Turn
from model import Block
from tokens.tokenizer import PromptTooLong


def by_method(flag: str, values: list[str], methods: list[str]) -> dict[str, str]:
    """Parse the values [METHOD=]VALUE of a flag into {method: value}.

    METHOD may be omitted if there is only one drafting method. Raises InputError on an unknown method.
    """
    drafting = [name for name in methods if name != PLAIN]
    settings = {}
    for value in values:
        name, separator, setting = value.partition("=")
        if not separator:
            if len(drafting) != 1:
                raise InputError(f"{flag} {value}: with several methods, write {flag} METHOD={value}")
            name, setting = drafting[0], value
        if name not in drafting:
            raise InputError(f"{flag} {value}: {name} is not one of {', '.join(drafting)}")
        settings[name] = setting
    return settings


def read_draftings(args: argparse.Namespace, methods: list[str]) -> dict[str, DraftOptions]:
    """Return each method's `DraftOptions` by name, plain decoding first, from the options of evaluate.py.

    A flag applies to the methods that take it. Raises InputError or ValueError.
    """
    settings = {name: by_method(f"--{name}", getattr(args, name), methods) for name in ("draft", "tree")}
    all_flags = method_flags(args)
    supported = {flag for name in methods for flag in flags_of(name)}
    draftings = {}
    # Flags that no method takes go to all: the first DraftOptions, PLAIN's, rejects them.
    for name in dict.fromkeys((PLAIN, *methods)):
        options = {field: values[name] for field, values in settings.items() if name in values}
        flags = {flag: value for flag, value in all_flags.items()
                 if flag in flags_of(name) or flag not in supported}
        takes_window = is_resizable(name) or not any(map(is_resizable, methods))
        window = args.draft_window if takes_window else None
        draftings[name] = DraftOptions(name, flags=flags, window=window, **options)
    return draftings


class Contender(NamedTuple):
    """A method that is compared. fingerprint: changes with any of its weights or options."""

    engine: Engine
    fingerprint: str


def load_contenders(
    target: Target, draftings: dict[str, DraftOptions], max_seq_len: int | None
) -> dict[str, Contender]:
    """Build an engine for each method; all share the target. Returns them by method name.

    Raises InputError if the target has no tokenizer or chat template, or a drafter cannot be built;
    ValueError if memory is short.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_template:
        raise InputError(
            f"{target.checkpoint}: evaluation needs a tokenizer with a chat template; this folder has none"
        )
    prompt_format = digest(tokenizer.template, target.config["stop_ids"])
    shared = f"{weights_fingerprint(target.model)} {prompt_format} {target.runtime.compile}"
    contenders = {}
    for name, drafting in draftings.items():
        engine = target.engine(drafting, max_seq_len=max_seq_len)
        drafter, trees = engine.drafter, [x.shape for x in engine.scheduler.drafters]
        windows = [block.window for block in drafter.modules() if isinstance(block, Block)]
        fingerprint = (f"{shared} {weights_fingerprint(drafter)} {drafter.fingerprint} {trees}"
                       f" {drafting.flags} {windows}")
        if ranks := target.model.ranks:  # each rank has a shard of the weights
            fingerprint = f"{ranks.count} ranks: {ranks.digest(fingerprint, engine.device)}"
        contenders[name] = Contender(engine, fingerprint)
    return contenders


def ask(engine: Engine, question: dict, sampling: Sampling) -> list[Turn]:
    """Answer the turns of a question, with the engine's own answers as history.

    Stops before a turn whose prompt does not fit in the context; the list may be empty.
    """
    messages, turns = [], []
    for text in question["turns"]:
        messages.append({"role": "user", "content": text})
        try:
            ids = encode(engine.tokenizer, messages, max_lengths=engine.max_lengths)
        except PromptTooLong:
            break
        if len(ids) >= engine.max_seq_len:
            break
        request, = engine.generate([ids], sampling)
        messages.append({"role": "assistant", "content": request.text})
        turns.append(Turn(
            ids, request.ids, request.text, request.finish, request.prefill_seconds, request.seconds,
            request.accept_lengths,
        ))
    return turns
