"""Which candidates are kept, and how often each is drawn, against plain Python over the whole vocabulary."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import draw, kept_candidates

V = 1000

MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": V - 1},
    {"temperature": 1.0, "top_k": V * 2, "top_p": 0.5},
]


def random_logits(seed: int, size: int = V) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def naive_set(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Kept candidates and their probabilities, by plain Python over the whole vocabulary."""
    scaled = [value / params.temperature for value in logits.double().tolist()]
    top = max(scaled)
    weights = {i: math.exp(value - top) for i, value in enumerate(scaled) if value > -math.inf}
    weights = {i: w for i, w in weights.items() if w >= params.min_p}
    order = sorted(weights, key=lambda i: (-scaled[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    mass = sum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in sorted(kept)}


@pytest.mark.parametrize("mix", MIXES)
def test_kept_candidates_equal_the_naive_set(mix: dict[str, Any]) -> None:
    params = SamplingParams(**mix)
    for seed in range(5):
        logits = random_logits(seed)
        if seed == 3:
            logits = logits.round()  # ties at every border
        if seed == 4:
            logits[100:] = -math.inf
        ids, scores = kept_candidates(logits.numpy(), params)
        expected = naive_set(logits, params)
        assert ids.tolist() == list(expected)
        weights = np.exp(scores)
        assert (weights / weights.sum()).tolist() == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize(
    "mix",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "min_p": 0.1},
    ],
)
def test_5000_draws_follow_the_analytic_distribution(mix: dict[str, Any]) -> None:
    logits = random_logits(11, size=12) * 0.4
    expected = naive_set(logits, SamplingParams(**mix))
    n = 5000
    drawn = Counter(
        draw(logits.numpy(), SamplingParams(**mix), seed=i % 50, position=i // 50) for i in range(n)
    )
    assert set(drawn) <= set(expected), "nothing outside the set is ever drawn"
    chi2 = sum((drawn[i] - n * p) ** 2 / (n * p) for i, p in expected.items())
    df = len(expected) - 1
    assert df >= 2
    assert chi2 < df + 4 * math.sqrt(2 * df)


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = {
        top_p: kept_candidates(logits.numpy(), SamplingParams(temperature=1.0, top_p=top_p))[0].tolist()
        for top_p in (0.01, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96)
    }
    assert kept == {
        0.01: [0],
        0.49: [0],
        0.51: [0, 1],
        0.79: [0, 1],
        0.81: [0, 1, 2],
        0.94: [0, 1, 2],
        0.96: [0, 1, 2, 3],
    }


def test_ties_at_a_border_go_to_the_lower_ids() -> None:
    logits = torch.zeros(V)
    logits[[400, 17, 900]] = 5.0
    for top_k, expected in ((1, [17]), (2, [17, 400]), (5, [0, 1, 17, 400, 900])):
        ids, _ = kept_candidates(logits.numpy(), SamplingParams(temperature=1.0, top_k=top_k))
        assert ids.tolist() == expected
