"""Whether draws follow a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["deviation"]


def deviation(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """How many standard deviations chi-square lies above its mean, made normal as Wilson and Hilferty (1931) did.

    counts: [V], how often each token was drawn. expected: [V], its probability, 0 for those that are filtered out;
    each of the others must be expected 5 times or more.
    Raises `AssertionError` where a filtered token was drawn, or too few draws were made.
    """
    inside = expected > 0
    assert not counts[~inside].any(), f"filtered out, and drawn: {np.flatnonzero(counts * ~inside).tolist()}"
    right = expected[inside] * counts.sum()
    assert right.min() >= 5, f"the rarest token is expected {right.min():.1f} times; 5 are wanted"
    df = inside.sum() - 1
    chi2 = ((counts[inside] - right) ** 2 / right).sum()
    return float(((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df)))
