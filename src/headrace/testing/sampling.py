"""The sampler's ops held to the executor's own: what is drawn and how it ranks is the same, id by id."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import draw
from headrace.executors.noise import Purpose, stream_keys
from headrace.executors.scoring import score
from headrace.testing.compare import ROWS
from headrace.testing.invariance import prove_rows_invariant

__all__ = ["check_draws", "check_scores", "draw_inputs"]

MIXES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.0, "min_p": 1e-6, "top_p": 0.99},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.9, "top_k": 10**9},
)
WIDTHS = (49_152, 1_000, 16, 7, 1)
"""Vocabularies: of SmolLM2, and around the sizes of vectors."""


def check_draws(op: Callable[..., torch.Tensor], *, row_invariant: bool) -> None:
    """Compare the op `draw` with the reference wherever it gives an id. Raises `AssertionError`."""
    for width in WIDTHS:
        logits, params, inputs = draw_inputs(max(ROWS), width, seed=width)
        before = logits.clone()
        ids = op(*inputs)
        if not torch.equal(logits, before):
            raise AssertionError(f"draw {width}: the logits were changed")
        for row, (own, token_id) in enumerate(zip(params, ids.tolist(), strict=True)):
            right = _right(logits[row], own, row)
            if token_id not in (-1, right):
                raise AssertionError(f"draw {width}: row {row} gave {token_id}, right is {right}: {own!r}")
        if row_invariant:
            _prove(op, inputs, (), f"draw {width}")


def check_scores(op: Callable[..., Any], *, row_invariant: bool) -> None:
    """Compare the op `score` with the reference: ids and ranks exactly, totals to 1e-5. Raises `AssertionError`."""
    for width in WIDTHS:
        logits, _, (_, ids, *_) = draw_inputs(max(ROWS), width, seed=width)
        ids = ids.clone()
        ids[::2] = torch.arange(ids[::2].shape[0]) * 7919 % width
        for k in sorted({0, 1, min(20, width), min(width, 2_000)}):
            totals, ranks, likeliest = op(logits, ids, k)
            right_totals, right_ranks, right_likeliest = score(logits, ids, k)
            what = f"score {width}, k {k}"
            if not torch.equal(ranks, right_ranks):
                raise AssertionError(f"{what}: ranks {ranks}, right are {right_ranks}")
            if not torch.equal(likeliest, right_likeliest):
                raise AssertionError(f"{what}: other likeliest ids than the reference's")
            if not torch.allclose(totals, right_totals, rtol=0, atol=1e-5):
                raise AssertionError(f"{what}: totals differ by {(totals - right_totals).abs().max()}")
            if row_invariant:
                _prove(op, [logits, ids], (k,), what)


def draw_inputs(
    rows: int, width: int, seed: int
) -> tuple[torch.Tensor, list[SamplingParams], list[torch.Tensor]]:
    """Return logits [rows, width], what each row asks for, and the arguments of the op `draw`.

    Row i draws with seed i - 50 at position 7 · i. Some rows have many ties, some mask most tokens, some are peaked.
    """
    logits = _logits(rows, width, seed)
    params = [SamplingParams(**MIXES[i % len(MIXES)]) for i in range(rows)]
    best = torch.from_numpy(
        logits.numpy().argmax(axis=1)
    )  # the first of equals, which torch does not promise
    seeds, positions = np.arange(rows) - 50, np.arange(rows) * 7
    keys = torch.from_numpy(stream_keys(seeds, positions, Purpose.TOKEN).view(np.int64))

    def numbers(of: Callable[[SamplingParams], float]) -> torch.Tensor:
        return torch.tensor([of(one) for one in params], dtype=torch.float64)

    inputs = [
        logits,
        best,
        keys,
        numbers(lambda one: one.temperature),
        torch.tensor([one.top_k for one in params]),
        numbers(lambda one: one.top_p),
        numbers(lambda one: math.log(one.min_p) if one.min_p > 0 else -math.inf),
    ]
    return logits, params, inputs


def _logits(rows: int, width: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3
    kinds = torch.arange(rows) % 7
    logits[kinds == 1] = logits[kinds == 1].round()
    logits[kinds == 2] *= 10
    logits[kinds == 3, width // 2 + 1 :] = -math.inf
    logits[kinds == 4] = 0.25
    logits[kinds == 5, width // 3] += 40
    return logits


def _right(logits: torch.Tensor, params: SamplingParams, row: int) -> int:
    values = logits.numpy()
    return int(values.argmax()) if params.temperature == 0 else draw(values, params, row - 50, row * 7)


def _prove(op: Callable[..., Any], inputs: list[torch.Tensor], rest: tuple[int, ...], what: str) -> None:
    def call(rows: slice) -> tuple[torch.Tensor, ...]:
        result = op(*(one[rows] for one in inputs), *rest)
        return result if isinstance(result, tuple) else (result,)

    prove_rows_invariant(call, what)
