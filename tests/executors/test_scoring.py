"""Log-probabilities against a naive computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.executors.scoring import likeliest, ranks, score, token_logprobs, without_totals


def naive(row: torch.Tensor, token_id: int, k: int) -> tuple[list[int], list[float], int]:
    logprobs = row.double().log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda i: (-row[i].item(), i))
    ids = [token_id, *(order if k < 0 else order[:k])]
    return ids, [logprobs[i] for i in ids], order.index(token_id) + 1


@pytest.mark.parametrize("k", [0, 1, 5, 99, 100, 1000, -1])
def test_equals_the_naive_computation(k: int) -> None:
    logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)) * 3
    logits[2] = logits[2].round()  # many ties
    logits[3, 50:] = -math.inf
    token_ids = [0, 99, 5, 60, 3, 3, 50]
    for row, token_id, entry in zip(logits, token_ids, token_logprobs(logits, token_ids, k), strict=True):
        ids, logprobs, rank = naive(row, token_id, k)
        assert entry.token_ids == ids
        assert entry.logprobs == pytest.approx(logprobs, abs=1e-12)
        assert entry.rank == rank
        assert not any(math.isnan(value) for value in entry.logprobs)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    token_ids = list(range(64))
    together = token_logprobs(logits, token_ids, 5)
    assert together == [token_logprobs(logits[i : i + 1].clone(), [i], 5)[0] for i in range(64)]
    assert together == [*token_logprobs(logits[:17], token_ids[:17], 5), *together[17:]]


def test_likeliest_breaks_ties_by_lower_index() -> None:
    values = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -np.inf])
    assert likeliest(values, 4).tolist() == [1, 3, 2, 4]
    assert likeliest(values, 7).tolist() == [1, 3, 2, 4, 5, 0, 6]
    assert likeliest(values, 0).tolist() == []
    for k in range(8):
        assert likeliest(values, k).tolist() == [1, 3, 2, 4, 5, 0, 6][:k]


def test_ranks_break_ties_by_lower_index() -> None:
    values = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -np.inf, -np.inf])
    order = [1, 3, 2, 4, 5, 0, 6, 7]
    assert ranks(values, np.arange(8)).tolist() == [order.index(i) + 1 for i in range(8)]
    assert ranks(values, np.array([5, 1, 5])).tolist() == [5, 1, 5]


def test_ids_that_are_asked_for_come_besides() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    logits[1] = logits[1].round()
    more = [[5, 99, 7], [], [0]]
    scored = token_logprobs(logits, [1, 2, 3], 2, more=more)
    assert [[one[0] for one in entry.more] for entry in scored] == more
    for row, entry in zip(logits, scored, strict=True):
        for token_id, logprob, rank in entry.more:
            _, [right, *_], right_rank = naive(row, token_id, 0)
            assert (logprob, rank) == (pytest.approx(right, abs=1e-12), right_rank)
    assert [one.token_ids for one in scored] == [
        one.token_ids for one in token_logprobs(logits, [1, 2, 3], 2)
    ]


def test_logits_are_scored_as_they_are_without_totals() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    for row, entry in zip(
        logits, token_logprobs(logits, [4, 9], 3, without_totals(score), [[7], [8]]), strict=True
    ):
        ids = [*entry.token_ids, entry.more[0][0]]
        assert [*entry.logprobs, entry.more[0][1]] == [float(row[i]) for i in ids]


def test_large_logits_do_not_overflow() -> None:
    (entry,) = token_logprobs(torch.tensor([[30000.0, 29999.0, -30000.0]]), [2], 1)
    assert entry.logprobs == pytest.approx([-60000.313, -0.313262], abs=1e-3)
    assert entry.rank == 3


def test_each_row_needs_its_token() -> None:
    with pytest.raises(ValueError, match="2 rows of logits need as many token ids, got 1"):
        token_logprobs(torch.zeros(2, 4), [1], 0)
