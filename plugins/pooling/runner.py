"""The worker's half: hidden states become one vector, as the prompt comes by in whatever chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.core.errors import EngineError
from headrace.core.interfaces import BatchRow, RunnerBatch, RunnerListener
from headrace.core.plan import NewRequest, StepResult
from headrace.plugins.pooling.options import EMBEDDING, POOLING, Embedding, Pooling

__all__ = ["PoolingListener"]

EPS = 1e-12
"""Shortest length a vector is divided by."""


@dataclass
class _Pooled:
    """One request under way."""

    pooling: Pooling
    next: int = 0
    """Position of the first token not seen yet."""
    value: torch.Tensor | None = None
    """[C] float64: the sum so far, or the one token's state."""


class PoolingListener(RunnerListener):
    """Pools the prompts of requests that ask for it. Its state is a function of the request: a preempted one goes and
    comes back as new.

    Sums are float64 and run token after token, so that the chunks a prompt comes in do not change a bit.
    """

    name = "pooling"

    def __init__(self) -> None:
        self._requests: dict[str, _Pooled] = {}

    def on_add(self, request: NewRequest) -> None:
        """Begin, at the first token that will be computed."""
        pooling = request.stash.get(POOLING)
        if pooling is not None:
            self._requests[request.request_id] = _Pooled(pooling, next=request.start)

    def on_remove(self, request_id: str) -> None:
        """Forget."""
        self._requests.pop(request_id, None)

    def on_hidden(self, batch: RunnerBatch, hidden: torch.Tensor) -> None:
        """Take the states of this step's prompt tokens, hidden [N, C]."""
        if not self._requests:
            return
        offset = 0
        for row in batch.rows:
            pooled = self._requests.get(row.request_id)
            if pooled is not None:
                _take(pooled, row, hidden[offset : offset + row.count])
            offset += row.count

    def on_tokens(self, batch: RunnerBatch, result: StepResult) -> None:
        """Send the vectors of prompts that are complete; one that is no number fails its request."""
        if not self._requests:
            return
        for row in batch.rows:
            pooled = self._requests.get(row.request_id)
            if pooled is None or pooled.value is None or pooled.next < row.num_prompt_tokens:
                continue
            outcome = result.requests[row.request_id]
            vector = _finish(pooled, row.num_prompt_tokens)
            if torch.isfinite(vector).all():
                outcome.stash[EMBEDDING] = Embedding(pooled.pooling.type, vector.tolist())
            else:
                outcome.error = (
                    "the model's hidden states are not finite (NaN or infinity), so there is no embedding"
                )


def _take(pooled: _Pooled, row: BatchRow, hidden: torch.Tensor) -> None:
    """Add the states [count, C] of positions from `row.start` on."""
    if row.start != pooled.next:
        raise EngineError(
            f"request {row.request_id!r} goes on at token {row.start}, and {pooled.next} were pooled"
        )
    count = min(row.count, row.num_prompt_tokens - row.start)
    if count <= 0:
        return
    pooled.next = row.start + count
    if pooled.pooling.type == "cls":
        if row.start == 0:
            pooled.value = hidden[0].double()
    elif pooled.pooling.type == "last":
        if pooled.next == row.num_prompt_tokens:
            pooled.value = hidden[count - 1].double()
    else:
        states = hidden[:count].double()
        if pooled.value is not None:
            states = torch.cat([pooled.value.unsqueeze(0), states])
        pooled.value = states.cumsum(0)[-1]  # unlike `sum`, from first to last


def _finish(pooled: _Pooled, num_tokens: int) -> torch.Tensor:
    """Return the vector [C], float32."""
    if pooled.value is None:
        raise EngineError("a vector is asked for before any state came")
    vector = pooled.value
    if pooled.pooling.type == "mean":
        vector = vector / num_tokens
    if pooled.pooling.normalize:
        vector = vector / vector.norm().clamp_min(EPS)
    return vector.float()
