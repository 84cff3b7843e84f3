"""The noise: fixed for ever, uniform, and unrelated between neighbours in any of its four counters."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.executors.noise import Purpose, child_seed, gumbel, stream_keys, uniform

IDS = np.arange(20_000)


def test_golden_values_never_change() -> None:
    """Another number here is another answer to every seed ever used: do not mend the test."""
    assert uniform(1, 2, 0, np.arange(4)).tolist() == [
        0.45863660094574243,
        0.5579707213525092,
        0.3073632122815927,
        0.24521380324924202,
    ]
    assert gumbel(-5, 7, 0, np.array([49151])).tolist() == pytest.approx([-1.3515029299262602], rel=1e-14)
    lowest, highest = -(2**63), 2**63 - 1
    assert uniform(lowest, 0, 0, np.array([0])).tolist() == [0.36864115459828983]
    assert uniform(highest, 2**40, 3, np.array([2**20])).tolist() == [0.9636087429538439]


def test_a_value_does_not_depend_on_the_values_beside_it() -> None:
    whole = gumbel(3, 9, 0, IDS)
    for count in (1, 2, 3, 7, 8, 9, 15, 17, 33, 1000):
        for start in (0, 1, 3, 777):
            part = gumbel(3, 9, 0, IDS[start : start + count])
            assert np.array_equal(part, whole[start : start + count]), (start, count)
    shuffled = np.random.default_rng(0).permutation(IDS)
    assert np.array_equal(gumbel(3, 9, 0, shuffled), whole[shuffled])
    assert np.array_equal(gumbel(3, 9, 0, IDS.astype(np.int32)), whole)


def test_keys_start_the_streams_that_numbers_are_read_from() -> None:
    """Place n of splitmix64, as Steele, Lea and Flood have it, is the number of token n."""
    seeds = np.array([1, -5, 2**63 - 1, -(2**63), 0])
    positions = np.array([2, 7, 2**40, 0, 0])
    keys = stream_keys(seeds, positions, Purpose.TOKEN)
    for key, seed, position in zip(keys.tolist(), seeds.tolist(), positions.tolist(), strict=True):
        state, numbers = key, []
        for _ in range(20):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            word = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            numbers.append((((word ^ (word >> 31)) >> 12) + 0.5) * 2.0**-52)
        assert uniform(seed, position, Purpose.TOKEN, np.arange(20)).tolist() == numbers


def test_token_ids_are_left_as_they_were() -> None:
    ids = np.arange(10, dtype=np.uint64)
    uniform(0, 0, 0, ids)
    assert np.array_equal(ids, np.arange(10))


def chi_squared(numbers: np.ndarray, bins: int = 64) -> float:
    """How many standard deviations the bin counts' χ² is from its mean."""
    counts, _ = np.histogram(numbers, bins=bins, range=(0, 1))
    expected = numbers.size / bins
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    return (chi2 - (bins - 1)) / np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("along", ["token", "position", "seed", "purpose"])
def test_uniform_along_each_counter(along: str) -> None:
    n = 20_000
    if along == "token":
        numbers = uniform(5, 5, 0, np.arange(n))
    elif along == "position":
        numbers = np.concatenate([uniform(5, i, 0, np.array([17])) for i in range(n)])
    elif along == "seed":
        numbers = np.concatenate([uniform(i - n // 2, 5, 0, np.array([17])) for i in range(n)])
    else:
        numbers = np.concatenate([uniform(5, 5, i, np.array([17])) for i in range(n)])
    assert ((numbers > 0) & (numbers < 1)).all()
    assert abs(chi_squared(numbers)) < 4
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(n)
    pairs, *_ = np.histogram2d(numbers[:-1], numbers[1:], bins=8, range=((0, 1), (0, 1)))
    chi2 = float(((pairs - n / 64) ** 2 / (n / 64)).sum())
    assert abs(chi2 - 63) / np.sqrt(2 * 63) < 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((7, 3, 0), (8, 3, 0)),
        ((7, 3, 0), (7, 4, 0)),
        ((7, 3, 0), (7, 3, 1)),
        ((7, 3, 0), (3, 7, 0)),
        ((7, 3, 0), (6, 4, 0)),
        ((7, 3, 0), (-7, 3, 0)),
        ((0, 0, 0), (-(2**63), 0, 0)),
    ],
)
def test_streams_are_unrelated(first: tuple[int, int, int], second: tuple[int, int, int]) -> None:
    a, b = uniform(*first, IDS), uniform(*second, IDS)
    for shift in (0, 1, 2):
        corr = np.corrcoef(a[shift:], b[: b.size - shift])[0, 1]
        assert abs(corr) < 4 / np.sqrt(IDS.size), (shift, corr)
    assert abs(chi_squared((a + b) % 1)) < 4
    assert not np.intersect1d(a, b).size


def test_every_input_bit_moves_half_of_the_output_bits() -> None:
    base = (uniform(12345, 678, 0, IDS[:500]) * 2**52).astype(np.uint64)
    for bit in range(0, 63, 7):
        other = (uniform(12345 ^ (1 << bit), 678, 0, IDS[:500]) * 2**52).astype(np.uint64)
        flipped = np.unpackbits((base ^ other).view(np.uint8)).sum() / (500 * 52)
        assert 0.48 < flipped < 0.52, bit


def test_gumbel_has_its_moments() -> None:
    numbers = np.concatenate([gumbel(1, position, 0, IDS) for position in range(10)])
    assert numbers.mean() == pytest.approx(0.5772, abs=0.01)
    assert numbers.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert numbers.min() > -3.7
    assert numbers.max() < 36.8


def test_children_wrap_in_int64() -> None:
    assert [child_seed(5, i) for i in range(3)] == [5, 6, 7]
    assert child_seed(2**63 - 1, 1) == -(2**63)
    assert child_seed(-1, 1) == 0


def test_purposes_are_part_of_the_contract() -> None:
    known = [("TOKEN", 0), ("ACCEPT", 1), ("RECOVER", 2)]
    assert [(purpose.name, int(purpose)) for purpose in Purpose] == known
