"""How many tokens are drafted: many where rows are cheap and guesses good, none where that does not pay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.plugins.speculative.draft_length import DraftLengths


def memory_bound(requests: int, drafts: int) -> float:
    """Seconds of a step: rows cost next to nothing."""
    return 0.013 + 0.0006 * (requests + drafts)


def compute_bound(requests: int, drafts: int) -> float:
    return 0.003 * (requests + drafts)


def play(
    lengths: DraftLengths,
    cost: Callable[[int, int], float],
    chance: Callable[[int], float],
    *,
    requests: int = 1,
    steps: int = 400,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[list[int], float]:
    """Run requests whose drafts are right by chance (step) -> p; return drafts a step, and the speed-up over none."""
    draw = random.Random(seed)
    drafted: list[int] = []
    tokens = seconds = 0.0
    under_way = [0] * requests
    for step in range(steps):
        num_drafts = sum(under_way)
        took = cost(requests, num_drafts) * (1 + noise * draw.random())
        seconds += cost(requests, num_drafts)
        for i, count in enumerate(under_way):
            accepted = 0
            while accepted < count and draw.random() < chance(step):
                accepted += 1
            tokens += 1 + accepted
            if count:
                lengths.verified(f"r{i}", count, accepted)
        lengths.step_took(requests, num_drafts, took)
        under_way = [lengths.choose(f"r{i}", requests) for i in range(requests)]
        drafted.append(num_drafts)
    return drafted, tokens / seconds / (requests / cost(requests, 0))


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_good_guesses_of_one_request_are_taken_whole(noise: float) -> None:
    drafted, speedup = play(DraftLengths(5), memory_bound, lambda step: 0.9, noise=noise)
    assert sum(drafted[50:]) / len(drafted[50:]) > 4
    assert speedup > 2.5


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("requests", [1, 16])
def test_bad_guesses_cost_next_to_nothing(requests: int, noise: float) -> None:
    drafted, speedup = play(DraftLengths(5), memory_bound, lambda step: 0.02, requests=requests, noise=noise)
    assert sum(drafted[50:]) / len(drafted[50:]) < 0.15 * requests
    assert speedup > 0.98


@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
def test_rows_that_cost_as_much_as_tokens_are_not_drafted(chance: float) -> None:
    drafted, speedup = play(DraftLengths(5), compute_bound, lambda step: chance, requests=16)
    assert sum(drafted[100:]) / len(drafted[100:]) < 2
    assert speedup > 0.95


def test_middling_guesses_are_few() -> None:
    drafted, speedup = play(DraftLengths(8), memory_bound, lambda step: 0.4, steps=1500)
    assert 1 <= sum(drafted[50:]) / len(drafted[50:]) < 4
    assert speedup > 1.3


def test_texts_change() -> None:
    """Bad for long, then good: a probe finds out."""
    lengths = DraftLengths(5)
    drafted, _ = play(lengths, memory_bound, lambda step: 0.02 if step < 500 else 0.95, steps=1500)
    assert sum(drafted[300:500]) < 40
    first_good = next(i for i in range(500, 1500) if drafted[i] == 5)
    assert first_good < 500 + 300
    assert sum(drafted[first_good : first_good + 100]) > 400


def test_load_changes() -> None:
    """What a row costs is known for each number of requests."""
    lengths = DraftLengths(5)
    for requests, few in ((1, False), (32, True), (1, False)):
        cost = compute_bound if few else memory_bound
        drafted, _ = play(lengths, cost, lambda step: 0.8, requests=requests, steps=200)
        average = sum(drafted[60:]) / len(drafted[60:]) / requests
        assert average < 0.2 if few else average > 3


def test_one_slow_step_changes_little() -> None:
    lengths = DraftLengths(5)
    play(lengths, memory_bound, lambda step: 0.9)
    before = lengths.price(1)
    lengths.step_took(1, 5, 3.0)
    assert lengths.price(1) < 4 * before
    assert lengths.choose("r0", 1) >= 3


def test_kinds_of_drafts_are_told_apart() -> None:
    lengths = DraftLengths(5)
    for _ in range(3):
        lengths.step_took(1, 0, 0.013)
    for i in range(60):
        for sureness, accepted in ((2, 0), (4, 3)):
            name = f"{i}-{sureness}"
            drafted = lengths.choose(name, 1, sureness)
            if drafted:
                lengths.verified(name, drafted, min(drafted, accepted))
    assert lengths.choose("new", 1, 4) >= 3
    assert lengths.choose("another", 1, 2) == 0


def test_fixed_lengths_ask_nothing() -> None:
    lengths = DraftLengths(3, adaptive=False)
    drafted, _ = play(lengths, compute_bound, lambda step: 0.0, requests=4, steps=20)
    assert drafted[1:] == [12] * 19


def test_requests_are_forgotten() -> None:
    lengths = DraftLengths(5)
    for i in range(10):
        lengths.choose(f"r{i}", 1)
        lengths.forget(f"r{i}")
    lengths.forget("unknown")
    lengths.verified("r1", 3, 1)
    assert not lengths._requests
