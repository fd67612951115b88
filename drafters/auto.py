"""--speculate auto: the best head in the checkpoint's folder, or a draft model, joined with prompt lookup."""
from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from checkpoint.load import CONFIG, WEIGHTS, read_config, stored_tensors
from checkpoint.source import STORED_DTYPES
from common.errors import InputError
from drafters.published import MAX_DRAFT_SIZE, advice
from engine.drafting import TARGET, DraftOptions
from extensions import METHODS

MAX_PADDING = 1024  # embedding rows without a token
# Methods in order of preference.
PRIORITY = "dspark", "eagle3", "p-eagle", "dflash", "mtp", "eagle2", "hydra", "medusa"


def available_heads(checkpoint: Path, draft: str | Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield method and folder of each head in a target's folder. draft: all methods with this folder."""
    for name in PRIORITY:
        folder = Path(draft or checkpoint / METHODS[name].draft)
        if (folder / CONFIG).is_file():
            yield name, folder


def bytes_read(checkpoint: str | Path) -> int:
    """Return the bytes of weights that decoding a token reads: without the embedding, unless it is tied.

    Raises InputError if its weights are missing or damaged.
    """
    tensors = stored_tensors(Path(checkpoint) / WEIGHTS, "convert the model again")
    unread = "embed." if any(name.startswith("lm_head.") for name in tensors) else ()
    return sum(
        math.prod(t.shape) * STORED_DTYPES[t.dtype].itemsize
        for name, t in tensors.items() if not name.startswith(unread)
    )


def same_vocabulary(one: dict, other: dict) -> bool:
    """Return whether two targets may have the same token ids, by their config.json. Loading compares them."""
    return abs(one["vocab_size"] - other["vocab_size"]) <= MAX_PADDING


def find_draft_model(checkpoint: Path, log: Callable[[str], None]) -> Path | None:
    """Return the model beside the target's folder that may draft for it and reads the fewest bytes, if any.

    It has the same vocabulary, and reads at most MAX_DRAFT_SIZE of the target's bytes. log: gets a line
    about a larger one.
    """
    config, size, fractions = read_config(checkpoint, "target"), bytes_read(checkpoint), {}
    for path in sorted(checkpoint.resolve().parent.glob(f"*/{CONFIG}")):
        with contextlib.suppress(InputError, OSError):  # not a converted model, or damaged
            folder, other = path.parent, read_config(path.parent, "target")
            if same_vocabulary(config, other) and not other.get("delta_layers"):
                fractions[folder] = bytes_read(folder) / size
    model = min(fractions, key=fractions.get, default=None)
    if fractions.get(model, 1.0) <= MAX_DRAFT_SIZE:
        return model
    if fractions.get(model, 1.0) < 1 and read_config(model)["num_layers"] < config["num_layers"]:
        log(f"--speculate auto: {model} reads {fractions[model]:.0%} of the target's bytes per token, over a"
            " third, too slow as a draft model: quantize it with --mode w4a8 --lm-head w4a8, or try --draft")
    return None


def choose(drafting: DraftOptions, checkpoint: Path, log: Callable[[str], None]) -> DraftOptions:
    """Resolve "auto": prompt lookup with --draft, with a head in the target's folder, or with a smaller model
    next to it.

    log: receives a line about the choice. Raises InputError if --draft is not a head.
    """
    if drafting.draft and (draft := read_config(drafting.draft))["kind"] == TARGET:
        if not same_vocabulary(draft, target := read_config(checkpoint, "target")):
            raise InputError(f"--draft {drafting.draft}: has a vocabulary of {draft['vocab_size']:,}, the"
                             f" target one of {target['vocab_size']:,}; choose one of the target's family")
        too_large = bytes_read(drafting.draft) > MAX_DRAFT_SIZE * bytes_read(checkpoint)
        log(f"--draft {drafting.draft}: a draft model; drafting with lookup+draft-model"
            + "; it has over a third of the target's size and may be slower, see --compare" * too_large)
        return replace(drafting, method="lookup+draft-model", window=None)
    for name, folder in available_heads(checkpoint, drafting.draft):
        options = replace(drafting, method=f"lookup+{name}", optional=not drafting.draft)
        try:
            options.folders(checkpoint)
        except InputError as e:
            if not drafting.draft:  # with --draft: the head is of another method
                log(f"--speculate auto: {e}")
            continue
        log(f"--speculate auto: drafting with lookup+{name}, head {folder}")
        return options
    if drafting.draft:
        raise InputError(f"--draft {drafting.draft}: --speculate auto supports no such head; pass its method"
                         " as --speculate")
    if model := find_draft_model(checkpoint, log):
        log(f"--speculate auto: drafting with lookup+draft-model, model {model}")
        return replace(drafting, method="lookup+draft-model", draft=model, window=None, optional=True)
    head_options = (("--tree", drafting.tree), ("--draft-window", drafting.window))
    unused = "".join(f"; {flag} is for heads" for flag, value in head_options if value is not None)
    log(f"--speculate auto: no usable head in {checkpoint}, drafting with prompt lookup only"
        f"{unused}. Other options:")
    for line in advice(checkpoint, read_config(checkpoint)):
        log(line)
    return replace(drafting, method="lookup", tree=None, window=None, optional=True)


def log_unused_heads(checkpoint: Path, log: Callable[[str], None]) -> None:
    """Log that a target's folder has heads that plain decoding does not use."""
    if names := " and ".join(name for name, _ in available_heads(checkpoint)):
        log(f"{checkpoint}: has a head ({names}) that is not used; to use it: --speculate auto")
