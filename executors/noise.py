"""Counter-based noise: sampling is a function, so no generator keeps a state.

The noise of one draw is named by four integers: the request's seed, the position of the token to be drawn, the
purpose, and the candidate's token id. Each is folded into a 64-bit word by the finalizer of splitmix64
(Steele, Lea and Flood 2014), whose output bits each depend on every input bit. A request therefore draws the
same tokens in any batch, after any preemption, and a draft is checked with the noise the plain run would use.

The functions here are frozen: other numbers would be other answers to everybody's seeds.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "child_seed", "gumbel", "stream_keys", "uniform"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0
    """The next token: by the sampler, and by drafters that guess what it will draw."""
    ACCEPT = 1
    """Whether a draft is accepted by rejection sampling; one number, at token id 0."""
    RECOVER = 2
    """The token in place of a draft that was not accepted."""


def child_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index` of n: seed + index, wrapped into int64."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _mix(word: Any) -> Any:
    """64 bits to 64 bits, of an int or of an array of uint64."""
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK
    return word ^ (word >> 31)


def _key(seed: Any, position: Any, purpose: int) -> Any:
    key = 0
    for counter in (seed, position, int(purpose)):
        key = _mix((key + counter + _GOLDEN) & _MASK)
    return key


def stream_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64], purpose: int) -> NDArray[np.uint64]:
    """Return the key of each draw [S]: where its stream of splitmix64 starts, which is read at place token id."""
    keys: NDArray[np.uint64] = _key(seeds.view(np.uint64), positions.view(np.uint64), purpose)
    return keys


def _words(seed: int, position: int, purpose: int, token_ids: NDArray[Any]) -> NDArray[np.uint64]:
    """64 random bits for each token id."""
    words = token_ids.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(_GOLDEN)
    words += np.uint64(_key(seed, position, purpose))
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MULTIPLIER_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    return words


def uniform(seed: int, position: int, purpose: int, token_ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return one number of the open interval (0, 1) for each of `token_ids` [K], of any integer dtype.

    Numbers are odd multiples of 2⁻⁵³: neither end is ever reached. `seed` is any int64.
    """
    words = _words(seed, position, purpose, token_ids)
    words >>= np.uint64(12)
    numbers = words.view(np.int64).astype(np.float64)  # signed: processors convert those several times faster
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def gumbel(seed: int, position: int, purpose: int, token_ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return one draw of the standard Gumbel distribution for each of `token_ids` [K]; within (-3.7, 36.8).

    The candidate with the largest logit / temperature + noise is a draw from the softmax of logits / temperature
    over the candidates: no normalisation enters, and a candidate's noise does not depend on the others.
    """
    numbers = uniform(seed, position, purpose, token_ids)
    np.log(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    np.log(numbers, out=numbers)
    np.negative(numbers, out=numbers)
    return numbers
