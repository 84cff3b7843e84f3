"""Draws drafts as the model's own tokens are drawn: with the request's parameters, its processors and its noise."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from headrace.core.interfaces import LogitsRow
from headrace.core.interfaces.build import WorkerContext
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.executors.sampler import Sampler, SamplingOps

__all__ = ["LOGITS_ROWS", "DraftSampler"]

LOGITS_ROWS = 64
"""Logits are made for at most so many rows at once: vocabularies are large."""


class DraftSampler:
    """A sampler of its own: masks and penalties of the request hold for drafts too, or they would be wrong.

    greedy: take the likeliest token, whatever the temperature.
    """

    def __init__(self, context: WorkerContext, ops: SamplingOps, *, greedy: bool) -> None:
        self._greedy = greedy
        self._sampler = Sampler(
            [(e.name, e.factory, e.plugin) for e in context.registry.entries("logits_processor")],
            (),
            context.vocab_size,
            ops,
        )

    def add(self, request: NewRequest) -> SamplingParams:
        """Take a request in; return the parameters that its rows must carry."""
        changes: dict[str, float | None] = {"logprobs": None, "prompt_logprobs": None}
        if self._greedy:
            changes["temperature"] = 0.0
        params = request.params.model_copy(update=changes)
        self._sampler.add(msgspec.structs.replace(request, params=params))
        return params

    def remove(self, request_id: str) -> None:
        """A request left."""
        self._sampler.remove(request_id)

    def draw(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> list[int | None]:
        """Return a token a row of logits [S, V], S ≤ 64; None where none can be drawn, which the model will tell."""
        return [one.token_id if one.error is None else None for one in self._sampler.sample(rows, logits)]
