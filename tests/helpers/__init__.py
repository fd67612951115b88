"""Helpers shared by tests."""
import json
import re
from pathlib import Path

import pytest

from common.errors import InputError

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"


def edit(folder: Path, *without: str, **changes) -> None:
    """Change the config of a folder. without: keys to remove."""
    file = folder / "config.json"
    config = {key: x for key, x in json.loads(file.read_text()).items() if key not in without}
    file.write_text(json.dumps(config | changes))


def refused(message: str):
    """Return a context that must raise an InputError. message: the start of its message."""
    return pytest.raises(InputError, match="^" + re.escape(message))
