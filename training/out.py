"""The folder that a training writes its head to: judged before torch is there."""
from __future__ import annotations

from pathlib import Path

from checkpoint.heads import KINDS
from common.errors import InputError
from common.files import read_json

STATE = "state.pt"  # of a training, in the folder of --work


def check_out(out: Path, kind: str, work: Path) -> None:
    """Raise InputError unless `out` is free, or holds a head of this kind that was trained in `work`."""
    out = out.resolve()  # "new/.." names something else once "new" is there
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        architecture = read_json(out / "config.json")["architectures"][0]
    except (InputError, KeyError, TypeError, IndexError):
        architecture = None
    if architecture not in KINDS[kind].architectures:
        raise InputError(
            f"--out {out}: holds something else than a trained head of this kind; choose another folder"
        )
    if not (work / STATE).exists():
        raise InputError(
            f"--out {out}: holds a head that was not trained in --work {work};"
            " choose another folder or delete it"
        )
