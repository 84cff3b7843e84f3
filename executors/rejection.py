"""Rejection sampling of drafts: tokens are distributed as without drafts, but they are not the same tokens.

A draft x drawn from q stays with the chance min(1, p(x) / q(x)), where p is what the plain run draws from; otherwise
a token is drawn from what p has more than q, max(0, p - q) (Leviathan, Kalman and Matias 2023, section 2.3). Either
way the token is distributed as p. The two draws have noise of their own, independent of the one that the draft was
drawn with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.interfaces import DraftDistribution
from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import kept_candidates
from headrace.executors.noise import Purpose, gumbel, uniform

__all__ = ["accept_or_recover"]

_ONE = np.zeros(1, np.int64)


def accept_or_recover(
    logits: NDArray[Any],
    params: SamplingParams,
    seed: int,
    position: int,
    draft: int,
    drawn_from: DraftDistribution,
) -> int:
    """Return `draft` if it is accepted, else the token in its place.

    logits: [V], processed, at least one above -inf and none NaN; the temperature is above 0.
    """
    ids, scores = kept_candidates(logits, params)
    weights = np.exp(scores)
    wanted = weights / weights.sum()
    known, chances = drawn_from.ids.numpy(), drawn_from.probabilities.numpy()
    offered = _at(known, chances, ids)
    own = float(_at(ids, wanted, np.array([draft]))[0])
    drafted = float(_at(known, chances, np.array([draft]))[0])
    if float(uniform(seed, position, Purpose.ACCEPT, _ONE)[0]) * drafted < own:
        return draft
    left = np.maximum(wanted - offered, 0.0)
    if not left.any():  # p and q are the same but for rounding
        left = wanted
    with np.errstate(divide="ignore"):
        return int(ids[np.argmax(np.log(left) + gumbel(seed, position, Purpose.RECOVER, ids))])


def _at(
    ids: NDArray[np.int64], values: NDArray[np.float64], wanted: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the value of each id of `wanted`, 0 where `ids`, which rise, lack it."""
    places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[places] == wanted, values[places], 0.0)
