"""--speculate auto: the best head in the checkpoint's folder, or a smaller model beside it, and prompt
lookup.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from checkpoint.load import CONFIG, WEIGHTS, read_config
from common.errors import InputError
from drafters.published import advice
from engine.drafting import TARGET, Drafting
from extensions import METHODS

MAX_DRAFT_SIZE = 0.5  # bytes of a draft model / bytes of the target
MAX_PADDING = 1024  # embedding rows without a token
# The first of these that the target has is used.
PRIORITY = "dspark", "eagle3", "p-eagle", "dflash", "mtp", "eagle2", "hydra", "medusa"


def heads(checkpoint: Path, draft: str | Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the methods whose head is in a target's folder, or may be the one in `draft`, and where it is."""
    for name in PRIORITY:
        folder = Path(draft or checkpoint / METHODS[name].draft)
        if (folder / CONFIG).is_file():
            yield name, folder


def draft_model_beside(checkpoint: Path) -> Path | None:
    """Return the smallest model in the target's parent folder that may draft for it, None without one.

    It has as many token ids, but for padding, and at most MAX_DRAFT_SIZE of the target's bytes. Whether the
    ids are the same is checked when it is loaded.
    """
    def size(folder: Path) -> int:
        return (folder / WEIGHTS).stat().st_size

    vocabulary, found = read_config(checkpoint, "target")["vocab_size"], []
    for config in sorted(checkpoint.resolve().parent.glob(f"*/{CONFIG}")):
        with contextlib.suppress(InputError, OSError):  # another program's, or damaged
            folder, other = config.parent, read_config(config.parent, "target")
            near = abs(other["vocab_size"] - vocabulary) <= MAX_PADDING
            if near and not other.get("delta_layers") and size(folder) <= MAX_DRAFT_SIZE * size(checkpoint):
                found.append(folder)
    return min(found, key=size, default=None)


def choose(drafting: Drafting, checkpoint: Path, log: Callable[[str], None]) -> Drafting:
    """Return the drafting that "auto" stands for: a head in the target's folder, or the one that --draft
    names, or a draft model beside the target, joined with prompt lookup; without one prompt lookup.

    log: called with a line about the choice. Raises InputError if --draft names no head.
    """
    if drafting.draft and read_config(drafting.draft)["kind"] == TARGET:
        log(f"--draft {drafting.draft}: is a model, which drafts, and the text where it repeats itself")
        return replace(drafting, method="lookup+draft-model", window=None)
    for name, folder in heads(checkpoint, drafting.draft):
        found = replace(drafting, method=f"lookup+{name}", optional=not drafting.draft)
        try:
            found.folders(checkpoint)
        except InputError as e:
            if not drafting.draft:  # else it is of another kind
                log(f"--speculate auto: {e}")
            continue
        log(f"--speculate auto: {name} drafts ({folder}), and the text where it repeats itself")
        return found
    if drafting.draft:
        raise InputError(f"--draft {drafting.draft}: is no head that auto drafts with; name one or a model")
    if model := draft_model_beside(checkpoint):
        log(f"--speculate auto: the smaller model {model} drafts, and the text where it repeats itself")
        return replace(drafting, method="lookup+draft-model", draft=model, window=None, optional=True)
    given = (("--tree", drafting.tree), ("--draft-window", drafting.window))
    unused = "".join(f"; {flag} is for heads" for flag, value in given if value is not None)
    log(f"--speculate auto: no usable head in {checkpoint}; the text drafts where it repeats itself"
        f" (prompt lookup){unused}. What would draft more:")
    for line in advice(checkpoint, read_config(checkpoint)):
        log(line)
    return replace(drafting, method="lookup", tree=None, window=None, optional=True)


def name_unused(checkpoint: Path, log: Callable[[str], None]) -> None:
    """Call `log` with a line about the heads in a target's folder, for plain decoding."""
    if names := " and ".join(name for name, _ in heads(checkpoint)):
        log(f"{checkpoint}: has a head ({names}) that is not used; --speculate auto uses it")
