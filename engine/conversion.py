"""Convert a Hugging Face folder, hub id or .gguf file before it is loaded."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkpoint.convert import converted_folder, default_folder, is_head, resolve_source
from checkpoint.load import is_converted, read_config
from engine.drafting import AUTO, DraftOptions, methods_of


def check_draft(checkpoint: str | Path, drafting: DraftOptions) -> None:
    """Raise InputError if the head or draft model is missing. Called before a large target is converted.

    An MTP layer is part of the target's checkpoint and is not checked.
    """
    if is_converted(drafting.draft or checkpoint):
        return
    if drafting.draft:
        resolve_source(drafting.draft)
    elif not {AUTO, "mtp"} & {*methods_of(drafting.method)}:
        if Path(checkpoint).parent.is_dir():  # not a hub id, which has no local folder
            resolve_source(checkpoint)
        drafting.folders(default_folder(checkpoint))


def convert_if_needed(
    checkpoint: str | Path, drafting: DraftOptions, log: Callable[[str], None]
) -> tuple[Path, DraftOptions]:
    """Convert target and draft checkpoint if needed. Return the target's folder and the drafting options.

    log: called with one line when something slow starts or ends. Raises InputError if a checkpoint is missing
    or of the wrong kind.
    """
    def folder_of(name: str | Path, target: Path | None = None) -> str:
        if not is_converted(name):
            return converted_folder(name, log, target)
        read_config(name)
        return str(name)

    check_draft(checkpoint, drafting)
    folder = Path(folder_of(checkpoint))
    if drafting.draft:
        is_model = drafting.uses_draft_model
        if drafting.method == AUTO and not is_converted(drafting.draft):
            is_model = not is_head(drafting.draft)
        draft = folder_of(drafting.draft, None if is_model else folder)
        drafting = replace(drafting, draft=draft)
    return folder, drafting
