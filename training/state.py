"""The state of a run on disk, from which it goes on exactly."""
from __future__ import annotations

from pathlib import Path

import torch

from common.errors import InputError, first_line
from common.files import atomic_path, check_file
from training.out import STATE


def save_state(folder: Path, state: dict) -> None:
    """Write FOLDER/state.pt, all of it or nothing. Raises InputError if it cannot be written."""
    path = folder / STATE
    try:
        with atomic_path(path) as part, open(part, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as e:
        # torch.save may put words of its own in place of what the system said.
        found = e.__context__ if isinstance(e.__context__, OSError) else e
        reason = getattr(found, "strerror", None) or first_line(found)
        raise InputError(
            f"{path}: the state cannot be written ({reason}); make room there, then run the command to go on"
        ) from None


def load_state(folder: Path, options: dict, device: torch.device) -> dict | None:
    """Read FOLDER/state.pt; None if there is none.

    Raises InputError if it is damaged, or if its "options" are not the ones given.
    """
    path = folder / STATE
    if not path.exists():
        return None
    check_file(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception:  # torch raises whatever the damage leads to, in words that help nobody
        raise InputError(f"{path}: cut off or damaged; delete it to start again") from None
    saved = state.get("options") if isinstance(state, dict) else None
    if not isinstance(saved, dict):
        raise InputError(f"{path}: holds no state of a training; delete it to start again")
    differs = sorted(name for name in options.keys() | saved.keys() if options.get(name) != saved.get(name))
    if differs:
        raise InputError(
            f"{path} was made with other settings or data ({', '.join(differs)});"
            " use another --work folder or delete it"
        )
    return state
