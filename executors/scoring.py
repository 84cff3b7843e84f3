"""Log-probabilities of given tokens, with the likeliest candidates beside them.

One way for generated tokens and for prompts. A row is scored alone, in float64 on one thread, so that its
numbers do not depend on its neighbours. Order is by value, then by lower id: `rank` and the candidates agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.logprobs import TokenLogprobs

__all__ = ["Score", "likeliest", "ranks", "score", "token_logprobs", "without_totals"]

Score = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The op `score` of `headrace.core.interfaces.ops`."""


def likeliest(values: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices [min(k, V)] of the k largest of `values` [V], in falling order, ties by lower index."""
    size = values.shape[0]
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if k >= size:
        return np.argsort(-values, kind="stable")
    floor = np.partition(values, size - k)[size - k]
    above = np.flatnonzero(values > floor)
    level = np.flatnonzero(values == floor)[: k - above.shape[0]]
    return np.concatenate((above[np.argsort(-values[above], kind="stable")], level))


def score(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The op `score` in plain numpy; see `headrace.core.interfaces.ops`."""
    scored = [_score_row(row, int(one), k) for row, one in zip(logits.numpy(), ids, strict=True)]
    totals, ranks, likeliest = zip(*scored, strict=True)
    return (
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor(ranks),
        torch.from_numpy(np.stack(likeliest)),
    )


def _score_row(row: NDArray[Any], token_id: int, k: int) -> tuple[float, int, NDArray[np.int64]]:
    logits = row.astype(np.float64)
    top = logits.max()
    total = top + np.log(np.exp(logits - top).sum())
    chosen = logits[token_id]
    rank = 1 + int((logits > chosen).sum()) + int((logits[:token_id] == chosen).sum())
    return float(total), rank, likeliest(logits, k)


def ranks(values: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank [M] of each of `ids` [M] among `values` [V]: 1 is the largest, ties by lower index."""
    chosen, ordered = values[ids], np.sort(values)
    first, last = np.searchsorted(ordered, chosen, "left"), np.searchsorted(ordered, chosen, "right")
    found: NDArray[np.int64] = values.shape[0] - last + 1
    for place in np.flatnonzero(last - first > 1):
        found[place] += np.count_nonzero(values[: ids[place]] == chosen[place])
    return found


def without_totals(score: Score) -> Score:
    """Return an op like `score` that normalises nothing: what it scores are the logits themselves."""

    def unnormalised(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Any:
        totals, ranks, likeliest = score(logits, ids, k)
        return torch.zeros_like(totals), ranks, likeliest

    return unnormalised


def token_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    k: int,
    score: Score = score,
    more: Sequence[Sequence[int]] = (),
) -> list[TokenLogprobs]:
    """Score token i in row i of `logits` [S, V] float32, each with the `k` likeliest (-1: all) and the ids `more[i]`.

    `logits` hold neither NaN nor +inf; one of -inf gives a logprob of -inf. score: the op that computes.
    """
    if len(token_ids) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits need as many token ids, got {len(token_ids)}")
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids)
    host = logits.detach().cpu().contiguous()
    totals, chosen_ranks, likeliest = score(
        host, chosen, logits.shape[1] if k < 0 else min(k, logits.shape[1])
    )
    ids = torch.cat((chosen[:, None], likeliest), dim=1)
    logprobs = host.gather(1, ids).double() - totals[:, None]
    others = [
        _more(host[row].numpy(), float(totals[row]), np.asarray(own, np.int64)) if own else []
        for row, own in enumerate(more or [()] * len(token_ids))
    ]
    return [
        TokenLogprobs(token_ids=own, logprobs=values, rank=rank, more=rest)
        for own, values, rank, rest in zip(
            ids.tolist(), logprobs.tolist(), chosen_ranks.tolist(), others, strict=True
        )
    ]


def _more(row: NDArray[Any], total: float, ids: NDArray[np.int64]) -> list[tuple[int, float, int]]:
    logprobs = row[ids].astype(np.float64) - total
    return list(zip(ids.tolist(), logprobs.tolist(), ranks(row, ids).tolist(), strict=True))
