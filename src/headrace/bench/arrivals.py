"""When requests are sent: all together, or at a rate with the randomness of real traffic."""

from __future__ import annotations

import itertools
import math
import random

__all__ = ["arrival_times"]


def arrival_times(number: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return when each request is sent, in seconds from the start, ascending.

    rate: requests a second; infinite: all at once.
    burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less is more bursty, more is
        more even, infinite is a fixed beat.

    The gaps are scaled so that the last request is sent at number / rate whatever the seed draws, as vLLM's
    benchmark does: figures of two seeds can be compared.
    """
    if math.isinf(rate):
        return [0.0] * number
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(number)]
    draw = random.Random(seed)
    times = list(itertools.accumulate(draw.gammavariate(burstiness, 1.0) for _ in range(number)))
    scale = number / rate / times[-1]
    return [time * scale for time in times]
