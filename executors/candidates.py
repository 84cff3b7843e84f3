"""Which tokens of a row may be drawn, and the draw.

A row is worked on alone, in float64 on one thread, so that what it draws does not depend on its neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.sampling_params import SamplingParams
from headrace.executors.noise import Purpose, gumbel
from headrace.executors.scoring import likeliest

__all__ = ["draw", "drawn_from", "kept_candidates"]

Ids = NDArray[np.int64]
Scores = NDArray[np.float64]


def draw(logits: NDArray[Any], params: SamplingParams, seed: int, position: int) -> int:
    """Draw a token from `logits` [V], of which at least one is above -inf and none is NaN; temperature is above 0.

    The draw is the largest score + noise over the kept candidates, ties by lower id.
    """
    ids, scores = kept_candidates(logits, params)
    if ids.shape[0] == 1:
        return int(ids[0])
    return int(ids[np.argmax(scores + gumbel(seed, position, Purpose.TOKEN, ids))])


def drawn_from(logits: NDArray[Any], params: SamplingParams) -> NDArray[np.float32]:
    """Return the scores [V] that a token is drawn from: `logits` / temperature, and -inf for what is filtered out.

    At temperature 0 these are the logits. Where tokens are forced with +inf, these have 0 and the others -inf.
    """
    top = logits.max()
    if top == np.inf:
        return np.where(logits == top, 0.0, -np.inf).astype(np.float32)
    if params.temperature == 0:
        return logits.astype(np.float32)
    ids, scores = kept_candidates(logits, params)
    found = np.full(logits.shape[0], -np.inf, np.float32)
    found[ids] = scores + float(top) / params.temperature
    return found


def kept_candidates(logits: NDArray[Any], params: SamplingParams) -> tuple[Ids, Scores]:
    """Apply temperature, min_p, top_k and top_p, in this order; return ids in rising order and their scores.

    Scores are logits / temperature, the largest moved to 0: the draw is from their softmax. Equal logits at the
    border of top_k or top_p are kept by lower id; min_p keeps all that reach it.
    """
    # top_k goes first: it and min_p keep the same tokens in either order, and a few are cheaper to work on than all.
    ids: Ids
    if 0 < params.top_k < logits.shape[0]:
        ids = np.sort(likeliest(logits, params.top_k))
        logits = logits[ids]
    else:
        ids = np.arange(logits.shape[0])
    scores = logits.astype(np.float64)
    top = scores.max()
    # A processor may force tokens with +inf: then these alone are left, all alike.
    scores = np.where(scores == top, 0.0, -np.inf) if top == np.inf else (scores - top) / params.temperature

    keep = scores >= math.log(params.min_p) if params.min_p > 0 else scores > -np.inf
    if not keep.all():
        ids, scores = ids[keep], scores[keep]
    if params.top_p < 1:
        best = _nucleus(scores, params.top_p)
        ids, scores = ids[best], scores[best]
    return ids, scores


def _nucleus(scores: Scores, top_p: float) -> Ids:
    """Return the places, rising, of the likeliest candidates that together reach `top_p`.

    The one that crosses the border is kept, and at least one is.
    """
    weights = np.exp(scores)
    target = top_p * weights.sum()
    # Few tokens reach it as a rule, so look at the likeliest few first: the order, and the sums along it, are
    # the same however many are looked at.
    count = 128
    while True:
        order = likeliest(scores, count)
        reached = np.cumsum(weights[order]) >= target
        if reached[-1] or count >= scores.shape[0]:
            break
        count *= 8
    crossing = int(np.argmax(reached)) if reached[-1] else order.shape[0] - 1
    return np.sort(order[: crossing + 1])
