"""The sampler's kernels: sure of nearly every draw, silent where roundings would decide, equal to the reference.

That an id given is the reference's is the kit's to prove (`OpSetSuite.test_draw`); here is when none is given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.cpu.isa import ISA_VARIABLE, supported_tiers
from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import Op
from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import draw
from headrace.executors.drawing import Draw, Drawing
from headrace.executors.noise import Purpose, gumbel
from headrace.executors.scoring import token_logprobs
from headrace.testing.sampling import draw_inputs


@pytest.fixture(params=[tier.name for tier in supported_tiers()])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return CpuOps()


def op(ops: CpuOps, name: str) -> Op:
    found = ops.get(name)
    assert found is not None
    return found


class Counted:
    """The op `draw`, and the rows it left to the reference."""

    def __init__(self, ops: CpuOps) -> None:
        self._fn = op(ops, "draw").fn
        self.left: list[int] = []

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = self._fn(*given)
        self.left += torch.nonzero(ids < 0)[:, 0].tolist()
        return ids


def drawn(op: Any, logits: torch.Tensor, seeds: list[int], **mix: Any) -> list[int]:
    params = SamplingParams(**mix)
    draws = [Draw(row, params, seed, 7) for row, seed in enumerate(seeds)]
    return [token for _, token in Drawing(op).tokens(draws, logits, logits.numpy().argmax(axis=1))]


def test_nearly_every_draw_is_certain(ops: CpuOps) -> None:
    _, _, inputs = draw_inputs(600, 20_000, seed=1)
    ids = op(ops, "draw").fn(*inputs)
    kinds = torch.arange(600) % 7
    random = (kinds != 4) & (kinds != 1)  # ties make borders that fall together
    assert int((ids[random] < 0).sum()) <= 1


def test_totals_that_are_equal_but_for_rounding_are_left_to_the_reference(ops: CpuOps) -> None:
    def difference(seed: int) -> float:
        first, second = gumbel(seed, 7, Purpose.TOKEN, np.arange(2))
        return float(second - first)

    seeds = [seed for seed in range(4000) if 0 < difference(seed) < 0.01]
    logits = torch.full((len(seeds), 50), -math.inf)
    logits[:, 0] = 0
    logits[:, 1] = torch.tensor([-difference(seed) for seed in seeds])
    counted = Counted(ops)
    assert drawn(counted, logits, seeds) == drawn(None, logits, seeds)
    assert len(seeds) > 3
    assert counted.left == list(range(len(seeds)))


@pytest.mark.parametrize(("top_p", "crossing"), [(0.5, 4), (0.25, 2), (0.875, 7)])
def test_a_border_met_exactly_is_left_to_the_reference(ops: CpuOps, top_p: float, crossing: int) -> None:
    """Eight equal logits: half of them reach 0.5 exactly."""
    logits = torch.full((200, 40), -math.inf)
    logits[:, 3:11] = 1.5
    counted = Counted(ops)
    seeds = list(range(200))
    tokens = drawn(counted, logits, seeds, top_p=top_p)
    assert tokens == drawn(None, logits, seeds, top_p=top_p)
    assert set(tokens) == set(range(3, 3 + crossing))
    assert 0 < len(counted.left) < 200


def test_infinite_logits_are_left_to_the_reference(ops: CpuOps) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[1, [40, 60]] = math.inf
    counted = Counted(ops)
    tokens = drawn(counted, logits, [1, 2, 3])
    assert counted.left == [1]
    assert tokens[1] in (40, 60)


def test_other_seeds_and_positions_draw_other_tokens(ops: CpuOps) -> None:
    logits = torch.zeros(1000, 3000)
    counted = Counted(ops)
    tokens = drawn(counted, logits, list(range(-500, 500)), temperature=2.0)
    assert counted.left == []
    assert len(set(tokens)) > 700
    assert tokens[:50] == [
        draw(logits[0].numpy(), SamplingParams(temperature=2.0), seed, 7) for seed in range(-500, -450)
    ]


def test_log_probabilities_equal_the_references(ops: CpuOps) -> None:
    logits = torch.randn(33, 5000, generator=torch.Generator().manual_seed(2)) * 4
    ids = [(i * 331) % 5000 for i in range(33)]
    for k in (0, 5, -1):
        got = token_logprobs(logits, ids, k, op(ops, "score").fn)
        for one, right in zip(got, token_logprobs(logits, ids, k), strict=True):
            assert (one.token_ids, one.rank) == (right.token_ids, right.rank)
            assert one.logprobs == pytest.approx(right.logprobs, abs=2e-6)
