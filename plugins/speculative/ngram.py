"""Prompt lookup: what follows where the request read alike before is likely to follow now."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.core.interfaces import BatchRow, Proposer, RunnerBatch
from headrace.core.plan import NewRequest, RequestResult, StepResult
from headrace.plugins.speculative.draft_length import DraftLengths
from headrace.plugins.speculative.observe import observe
from headrace.plugins.speculative.options import SpeculativeSection
from headrace.plugins.speculative.suffix_index import SuffixIndex

if TYPE_CHECKING:
    import torch

__all__ = ["NgramProposer"]


class NgramProposer(Proposer):
    """Drafts copies of a request's own ids, prompt and answer. It needs no model and no KV."""

    name = "ngram"

    def __init__(self, section: SpeculativeSection, lengths: DraftLengths | None = None) -> None:
        self._shortest, self._longest = section.prompt_lookup_min, section.prompt_lookup_max
        self._lengths = lengths or DraftLengths(section.num_speculative_tokens, adaptive=section.adaptive)
        self._indexes: dict[str, SuffixIndex] = {}
        self._spent = 0.0
        """Seconds the last call took: they are a part of what its drafts cost."""

    def on_add(self, request: NewRequest) -> None:
        """Begin an index."""
        if request.params.max_tokens != 0:
            self._indexes[request.request_id] = SuffixIndex(self._shortest, self._longest)

    def on_remove(self, request_id: str) -> None:
        """Forget a request."""
        self._indexes.pop(request_id, None)
        self._lengths.forget(request_id)

    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        """Look up the end of each request."""
        begun = time.perf_counter()
        num_drawing = observe(self._lengths, batch, result, begun - batch.started + self._spent)
        drafts: dict[str, list[int]] = {}
        for row in batch.rows:
            found = self._look_up(row, result.requests[row.request_id], num_drawing)
            if found:
                drafts[row.request_id] = found
        self._spent = time.perf_counter() - begun
        return drafts

    def _look_up(self, row: BatchRow, outcome: RequestResult, num_drawing: int) -> list[int]:
        index = self._indexes.get(row.request_id)
        if index is None:
            return []
        if len(index) < row.num_confirmed:
            index.extend(np.asarray(row.tokens[len(index) : row.num_confirmed]).tolist())
        if not outcome.tokens:
            return []
        index.extend(outcome.tokens)
        match = index.match()
        if match is None:
            return []
        count = self._lengths.choose(row.request_id, num_drawing, match.length)
        return index.following(match.position, count)
