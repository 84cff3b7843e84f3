"""Draws drafts as the model's own tokens are drawn: with the request's parameters, its processors and its noise."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from headrace.core.interfaces import DraftDistribution, LogitsRow
from headrace.core.interfaces.build import WorkerContext
from headrace.core.plan import NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import kept_candidates
from headrace.executors.sampler import Sampler, SamplingOps
from headrace.plugins.speculative.options import SpeculativeSection

__all__ = ["LOGITS_ROWS", "DraftSampler"]

LOGITS_ROWS = 64
"""Logits are made for at most so many rows at once: vocabularies are large."""


class DraftSampler:
    """A sampler of its own: masks and penalties of the request hold for drafts too, or they would be wrong."""

    def __init__(self, context: WorkerContext, ops: SamplingOps, section: SpeculativeSection) -> None:
        self._greedy = section.draft_sampling == "greedy"
        self._keeps = section.acceptance == "rejection"
        self._distributions: dict[str, list[DraftDistribution]] = {}
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
        self._distributions.pop(request_id, None)

    def distributions(self, request_id: str) -> Sequence[DraftDistribution]:
        """What the last drafts of a request were drawn from, where rejection sampling asks."""
        return self._distributions.get(request_id, ())

    def draw(self, rows: Sequence[LogitsRow], logits: torch.Tensor) -> list[int | None]:
        """Return a token a row of logits [S, V], S ≤ 64; None where none can be drawn, which the model will tell."""
        logits = logits.cpu().contiguous()  # what the sampler changes in place is looked at again
        tokens = [one.token_id if one.error is None else None for one in self._sampler.sample(rows, logits)]
        if self._keeps:
            for row, token, own in zip(rows, tokens, logits, strict=True):
                if token is not None:
                    kept = self._distributions.setdefault(row.request_id, [])
                    kept[row.position - row.num_confirmed :] = [_distribution(row.params, token, own)]
        return tokens


def _distribution(params: SamplingParams, token: int, logits: torch.Tensor) -> DraftDistribution:
    if params.temperature == 0:
        return DraftDistribution(torch.tensor([token]), torch.ones(1, dtype=torch.float64))
    ids, scores = kept_candidates(logits.numpy(), params)
    weights = np.exp(scores)
    return DraftDistribution(torch.from_numpy(ids), torch.from_numpy(weights / weights.sum()))
