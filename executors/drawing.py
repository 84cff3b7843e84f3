"""The draws of a slice: by an op of the op set in use, and by the reference where it is not certain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import draw
from headrace.executors.noise import Purpose, stream_keys

__all__ = ["Draw", "Drawing"]


class Draw(NamedTuple):
    """One token to draw."""

    row: int
    """Its row of logits, which holds one above -inf and no NaN."""
    params: SamplingParams
    """The temperature is above 0."""
    seed: int
    position: int


class Drawing:
    """Draws tokens; what is drawn does not depend on the op.

    Parameters
    ----------
    op: `draw` of `headrace.core.interfaces.ops`; None: the reference draws every token.
    """

    def __init__(self, op: Callable[..., torch.Tensor] | None) -> None:
        self._op = op

    def tokens(
        self, draws: Sequence[Draw], logits: torch.Tensor, best: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Return (row, token) of each draw.

        logits: [S, V] float32, contiguous, on the host. best: [S], ids of the largest ones.
        """
        if not draws:
            return []
        ids = [-1] * len(best) if self._op is None else _by_op(self._op, draws, logits, best)
        return [
            (row, draw(logits[row].numpy(), params, seed, position) if ids[row] < 0 else ids[row])
            for row, params, seed, position in draws
        ]


def _by_op(
    op: Callable[..., torch.Tensor], draws: Sequence[Draw], logits: torch.Tensor, best: NDArray[np.int64]
) -> list[int]:
    count = len(best)
    seeds, positions, top_k = (np.zeros(count, np.int64) for _ in range(3))
    temperature, top_p = np.zeros(count), np.ones(count)  # rows without a draw: greedy
    log_min_p = np.full(count, -math.inf)
    rows = [one.row for one in draws]
    params = [one.params for one in draws]
    seeds[rows] = [one.seed for one in draws]
    positions[rows] = [one.position for one in draws]
    temperature[rows] = [one.temperature for one in params]
    top_k[rows] = [max(0, one.top_k) for one in params]
    top_p[rows] = [one.top_p for one in params]
    log_min_p[rows] = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]
    keys = stream_keys(seeds, positions, Purpose.TOKEN).view(np.int64)
    settings = (best, keys, temperature, top_k, top_p, log_min_p)
    ids: list[int] = op(logits, *map(torch.from_numpy, settings)).tolist()
    return ids
