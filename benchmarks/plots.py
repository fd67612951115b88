"""Plots in one style, written atomically."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from common.writing import atomic_path


@contextlib.contextmanager
def picture(path: Path, width: float, height: float) -> Iterator:
    """Yield a matplotlib figure of width x height inches; at the end, save it at `path` as a PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with atomic_path(path) as part:
            figure.savefig(part, format="png", dpi=120)
