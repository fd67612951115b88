"""Statistical tests with stated false-alarm rates."""
import math

import torch


def chi_square_limit(freedom: int) -> float:
    """The 1 - 1e-6 quantile, by the Wilson-Hilferty approximation."""
    a = 2 / (9 * freedom)
    return freedom * (1 - a + 4.75 * math.sqrt(a)) ** 3


def chi_square(observed: torch.Tensor, expected) -> float:
    return float(((observed - expected).double() ** 2 / expected).sum())
