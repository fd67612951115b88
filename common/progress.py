"""Progress bars on stderr."""
import sys

from tqdm import tqdm


def progress_bar(*iterable, **options) -> tqdm:
    """Return a tqdm bar: redrawn twice a second on a terminal, else printed every 15 seconds."""
    return tqdm(*iterable, mininterval=0.5 if sys.stderr.isatty() else 15, miniters=0, **options)
