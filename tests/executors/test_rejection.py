"""Rejection sampling: whatever drafts are drawn from, tokens are distributed as the plain run's. 20,000 draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import DraftDistribution, LogitsRow
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.candidates import kept_candidates
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
}


def shuffled(low: float, high: float, seed: int) -> torch.Tensor:
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    return torch.linspace(low, high, V)[order]


LOGITS = shuffled(-1.7, 1.7, 4)
DRAFTERS = {"like the model": LOGITS + shuffled(-0.5, 0.5, 5), "unlike it": shuffled(-2.0, 2.0, 6)}


def probabilities(
    logits: torch.Tensor, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, scores = kept_candidates(logits.numpy(), params)
    weights = np.exp(scores)
    return ids, weights / weights.sum()


def steps(params: SamplingParams, drafter: torch.Tensor, count: int) -> Iterator[list[LogitsRow]]:
    """64 requests whose next token was drafted: with their seed and the noise of their place, as drafters do."""
    ids, chances = probabilities(drafter, params)
    offered = DraftDistribution(torch.from_numpy(ids), torch.from_numpy(chances))
    seeded = [params.model_copy(update={"seed": seed}) for seed in range(ROWS)]
    native = CpuOps().get("draw")
    assert native is not None
    drafting = Sampler([], [], V, SamplingOps(native.fn))
    for position in range(1, count + 1):
        tokens, stash = [0] * position, Stash()
        rows = [LogitsRow(f"r{i}", own, stash, 1, position, tokens, position) for i, own in enumerate(seeded)]
        drafts = drafting.sample(rows, drafter.expand(ROWS, V).clone())
        yield [
            replace(row, draft=draft.token_id, draft_distribution=offered)
            for row, draft in zip(rows, drafts, strict=True)
        ]


def drawn(params: SamplingParams, drafter: torch.Tensor) -> tuple[NDArray[np.int64], int]:
    """Return how often each token came, and how many drafts stayed."""
    sampler = Sampler([], [], V)
    counts, stayed = np.zeros(V, np.int64), 0
    for asked in steps(params, drafter, math.ceil(DRAWS / ROWS)):
        for row, sampled in zip(asked, sampler.sample(asked, LOGITS.expand(ROWS, V).clone()), strict=True):
            counts[sampled.token_id] += 1
            stayed += sampled.token_id == row.draft
    return counts, stayed


CASES = [("like the model", "none"), *(("unlike it", setting) for setting in SETTINGS)]


@pytest.mark.parametrize(("drafter", "setting"), CASES)
def test_tokens_follow_the_distribution_of_the_model(setting: str, drafter: str) -> None:
    params = SamplingParams(**SETTINGS[setting])
    counts, stayed = drawn(params, DRAFTERS[drafter])
    expected, offered = np.zeros(V), np.zeros(V)
    for found, logits in ((expected, LOGITS), (offered, DRAFTERS[drafter])):
        ids, chances = probabilities(logits, params)
        found[ids] = chances
    assert counts.sum() >= DRAWS
    assert deviation(counts, expected) < LIMIT
    # A draft stays with the chance that p and q have in common: neither all of them nor none.
    assert stayed / counts.sum() == pytest.approx(np.minimum(expected, offered).sum(), abs=0.02)
    assert 0.2 < stayed / counts.sum() < 0.95


def test_the_statistic_would_notice_drafts_that_all_stay() -> None:
    params = SamplingParams()
    counts = np.zeros(V, np.int64)
    for rows in steps(params, DRAFTERS["like the model"], 40):
        for row in rows:
            assert row.draft is not None
            counts[row.draft] += 1
    assert deviation(counts, probabilities(LOGITS, params)[1]) > LIMIT


def test_a_draft_that_cannot_be_drawn_is_never_kept() -> None:
    params = SamplingParams(seed=1, top_k=1)
    best = int(LOGITS.argmax())
    wrong = (best + 1) % V
    offered = DraftDistribution(torch.tensor([wrong]), torch.ones(1, dtype=torch.float64))
    row = LogitsRow("r", params, Stash(), 1, 3, [0] * 3, 3, wrong, offered)
    assert Sampler([], [], V).sample([row], LOGITS[None].clone())[0].token_id == best


def test_the_same_distribution_keeps_every_draft() -> None:
    _, stayed = drawn(SamplingParams(top_k=9), LOGITS)
    assert stayed == math.ceil(DRAWS / ROWS) * ROWS
