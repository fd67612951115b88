"""Progress on stderr."""
import contextlib
import sys
from collections.abc import Iterator
from threading import Timer

from tqdm import tqdm

from common.cli import is_main_rank, log_stderr

QUIET_SECONDS = 2


def progress_bar(*iterable, **options) -> tqdm:
    """Return a tqdm bar: updated twice a second on a terminal, else every 15 seconds."""
    return tqdm(*iterable, mininterval=0.5 if sys.stderr.isatty() else 15, miniters=0, **options)


@contextlib.contextmanager
def announced(line: str) -> Iterator[None]:
    """Print a line if the context takes longer than QUIET_SECONDS."""
    timer = Timer(QUIET_SECONDS, log_stderr, [line])
    if is_main_rank():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
