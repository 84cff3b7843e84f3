"""Log-probabilities of given tokens, with the likeliest candidates beside them.

One way for generated tokens and for prompts. A row is scored alone, in float64 on one thread, so that its
numbers do not depend on its neighbours. Order is by value, then by lower id: `rank` and the candidates agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.logprobs import TokenLogprobs

if TYPE_CHECKING:
    import torch

__all__ = ["likeliest", "row_logprobs", "token_logprobs"]


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


def row_logprobs(row: torch.Tensor, token_id: int, k: int) -> TokenLogprobs:
    """Score `token_id` and the `k` likeliest tokens of logits `row` [V]; k = -1: the whole vocabulary.

    `row` holds neither NaN nor +inf; a logit of -inf gives a logprob of -inf.
    """
    logits = row.detach().cpu().numpy().astype(np.float64)
    top = logits.max()
    total = top + np.log(np.exp(logits - top).sum())
    chosen = logits[token_id]
    rank = 1 + int((logits > chosen).sum()) + int((logits[:token_id] == chosen).sum())
    ids = likeliest(logits, logits.shape[0] if k < 0 else k)
    return TokenLogprobs(
        token_ids=[token_id, *ids.tolist()],
        logprobs=[float(chosen - total), *(logits[ids] - total).tolist()],
        rank=rank,
    )


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Score token i in row i of `logits` [S, V] float32, each with the `k` likeliest (-1: all)."""
    if len(token_ids) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits need as many token ids, got {len(token_ids)}")
    return [row_logprobs(row, token_id, k) for row, token_id in zip(logits, token_ids, strict=True)]
