"""How often each token is drawn, against the analytic distribution: chi-square over 20,000 draws a setting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import LogitsRow
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.sampler import Sampler, SamplingOps
from headrace.testing.statistics import deviation

DRAWS = 20_000
ROWS = 64
V = 24
LIMIT = 4.5
"""Standard deviations; seeds are fixed, so that a setting passes always or never."""

FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.85},
    "min_p": {"min_p": 0.04},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    **FIELDS,
    **{f"{a}, {b}": FIELDS[a] | FIELDS[b] for a, b in itertools.combinations(FIELDS, 2)},
    "all": {name: value for field in FIELDS.values() for name, value in field.items()},
}


def make_logits() -> torch.Tensor:
    """Probabilities from about 0.15 down to 0.005, in no order."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(4))
    return torch.linspace(-1.7, 1.7, V)[order]


def analytic(logits: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """The distribution [V] that the settings describe: temperature, min_p, top_k, top_p, in this order."""
    weights = (logits.double() / params.temperature).softmax(-1).numpy()
    weights = np.where(weights >= params.min_p * weights.max(), weights, 0.0)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p]] = 0.0
    return weights / weights.sum()


def count_draws(logits: torch.Tensor, params: SamplingParams, ops: SamplingOps | None) -> NDArray[np.int64]:
    """Draw at many positions and with many seeds, 64 rows at a time, through the sampler."""
    sampler = Sampler([], [], V, ops)
    seeded = [params.model_copy(update={"seed": seed}) for seed in range(ROWS)]
    counts = np.zeros(V, np.int64)
    for position in range(1, math.ceil(DRAWS / ROWS) + 1):
        tokens = [0] * position
        rows = [
            LogitsRow(f"r{i}", own, Stash(), 1, position, tokens, position) for i, own in enumerate(seeded)
        ]
        for sampled in sampler.sample(rows, logits.expand(ROWS, V).clone()):
            assert sampled.error is None
            counts[sampled.token_id] += 1
    return counts


@pytest.fixture(scope="module")
def native() -> SamplingOps:
    found = CpuOps().get("draw")
    assert found is not None
    return SamplingOps(found.fn)


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(setting: str, native: SamplingOps) -> None:
    logits, params = make_logits(), SamplingParams(**SETTINGS[setting])
    counts = count_draws(logits, params, native)
    assert counts.sum() >= DRAWS
    assert deviation(counts, analytic(logits, params)) < LIMIT


def test_the_reference_draws_the_same(native: SamplingOps) -> None:
    """Token by token, so that what the kernel's draws show holds for it, too."""
    params = SamplingParams(**SETTINGS["all"])
    assert np.array_equal(
        count_draws(make_logits(), params, None), count_draws(make_logits(), params, native)
    )


def test_the_statistic_tells_distributions_apart(native: SamplingOps) -> None:
    """Draws at a temperature 8 % off, or with one token less among those kept, do not pass."""
    logits = make_logits()
    counts = count_draws(logits, SamplingParams(temperature=1.0), native)
    for temperature in (0.92, 1.08):
        assert deviation(counts, analytic(logits, SamplingParams(temperature=temperature))) > LIMIT
    counts = count_draws(logits, SamplingParams(top_k=8), native)
    assert deviation(counts, analytic(logits, SamplingParams(top_k=9))) > 5 * LIMIT
