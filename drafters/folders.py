"""Where the heads and models are that methods draft with: --draft, or the target's folder.

Known before torch is there.
"""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError


def kind_of(method: str) -> str:
    """The kind of head that a method drafts with. EAGLE-1 and EAGLE-2 share one."""
    return "eagle" if method == "eagle2" else method


def head_folder(checkpoint: Path, method: str, draft: Path | None) -> Path:
    """The folder of a method's head: that of --draft, or CHECKPOINT/KIND. Raises InputError if there is none.
    """
    folder = draft or checkpoint / kind_of(method)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no {kind_of(method)} head there; convert one into it, name it with --draft, or use"
            " another --speculate"
        )
    return folder


def model_folder(draft: Path | None) -> Path:
    """The folder of a draft model. Raises InputError if --draft names none."""
    if draft is None:
        raise InputError(
            "--speculate draft-model: name a smaller converted model of the same vocabulary with --draft"
        )
    return draft


def of_draft(takers: list[str], draft: str | Path | None) -> list[str]:
    """Of methods with a head or a model, which draft together, those that --draft is for: a draft model, as
    it has no folder of its own, else all. Raises InputError if --draft is for two heads.
    """
    if len(takers) > 1 and "draft-model" in takers:
        return ["draft-model"]
    if draft and len(set(map(kind_of, takers))) > 1:
        raise InputError(
            f"--speculate {'+'.join(takers)}: --draft {draft}: both take a head; convert them into the"
            " checkpoint's folder and leave it out"
        )
    return takers
