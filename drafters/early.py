"""What can be said of methods, and of the heads and files that they name, before torch is there."""
from __future__ import annotations

import importlib
from pathlib import Path

from checkpoint.folder import HEAD_KINDS, read_config
from drafters import METHODS, headless
from drafters.folders import head_folder, kind_of, model_folder, of_draft
from drafters.no_use import refuse


def judge_method(
    checkpoint: str, config: dict, name: str, draft: str | None, tree: object, flags: dict
) -> None:
    """Judge a value of --speculate and what it needs, as far as that goes without torch.

    config: the target's config.json, empty if it is still to be converted. draft, tree: what --draft and
    --tree say, nothing if they say nothing. flags: of the method. Raises InputError.
    """
    if headless(name):
        refuse(name, draft=draft, tree=tree)
    parts = {part: METHODS[part] for part in name.split("+") if METHODS[part]}
    named = of_draft([part for part, method in parts.items() if not method.headless], draft)
    for part, method in parts.items():
        if method.early:
            module, _, function = method.early.partition(":")
            getattr(importlib.import_module(module), function)(flags, config.get("vocab_size"))
        own = Path(draft) if draft and part in named else None
        if part == "draft-model":
            read_config(model_folder(own), "target")
        elif kind_of(part) in HEAD_KINDS and (config or own):
            read_config(head_folder(Path(checkpoint), part, own), kind_of(part))
