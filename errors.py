"""The one error a user sees. Apart from everything else, so that a command line can catch it before torch is imported."""
from __future__ import annotations

import sys
from collections.abc import Callable


class CheckpointError(Exception):
    """A checkpoint cannot be read, converted or used. The message is one line: what, where, what to do."""


def exit_status(action: Callable[[], None], *expected: type[Exception]) -> int:
    """Do it -> 0; 1 with a one-line error on stderr for a CheckpointError or one of `expected`, 130 when interrupted."""
    try:
        action()
    except (CheckpointError, *expected) as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0
