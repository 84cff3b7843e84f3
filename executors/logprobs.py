"""What requests are told of the rows their tokens were drawn from: of the model's logits, or of those drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.interfaces import LogitsRow
from headrace.core.logprobs import LogprobsMode, TokenLogprobs
from headrace.core.sampling_params import SamplingParams
from headrace.executors.candidates import drawn_from
from headrace.executors.scoring import Score, token_logprobs, without_totals

__all__ = ["LogprobsReport", "RawLogits"]


@dataclass(frozen=True)
class RawLogits:
    """The model's logits of the rows that are to be told of them."""

    indices: list[int]
    """Of those rows."""
    logits: torch.Tensor
    """[len(indices), V]"""


class LogprobsReport:
    """Scores what was drawn, for the rows that ask.

    Parameters
    ----------
    score: the op that computes.
    mode: for requests that do not choose one.
    """

    def __init__(self, score: Score, mode: LogprobsMode) -> None:
        self._scores = {"logprobs": score, "logits": without_totals(score)}
        self._mode = mode

    def set_aside(
        self, rows: Sequence[LogitsRow], logits: torch.Tensor, changes: Callable[[str], bool]
    ) -> RawLogits:
        """Keep the rows of `logits` [S, V] that raw values are asked of. changes: whether a request's may change."""
        asking = [i for i, row in enumerate(rows) if self.asks(row.params, "raw")]
        stay = len(asking) == len(rows) and not any(changes(row.request_id) for row in rows)
        if stay or not asking:
            return RawLogits(asking, logits)
        return RawLogits(asking, logits[asking])  # a copy

    def of(
        self, rows: Sequence[LogitsRow], raw: RawLogits, logits: torch.Tensor, tokens: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """Return, by row, what is told of `tokens` [S]; those below 0 failed. logits: [S, V], as tokens are drawn."""
        found = self._score(rows, raw.indices, raw.logits, tokens)
        processed = [i for i, row in enumerate(rows) if tokens[i] >= 0 and self.asks(row.params, "processed")]
        if processed:
            own = np.stack([drawn_from(logits[i].numpy(), rows[i].params) for i in processed])
            found |= self._score(rows, processed, torch.from_numpy(own), tokens)
        return found

    def asks(self, params: SamplingParams, stage: str) -> bool:
        """Whether a request is told of logits "raw" or "processed"."""
        return params.logprobs is not None and (params.logprobs_mode or self._mode).startswith(stage)

    def _score(
        self, rows: Sequence[LogitsRow], indices: list[int], logits: torch.Tensor, tokens: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """Score tokens, rows that ask for equally many candidates together. logits: [len(indices), V]."""
        alike: dict[tuple[int, str], list[int]] = {}
        for place, index in enumerate(indices):
            params = rows[index].params
            if params.logprobs is not None and tokens[index] >= 0:
                unit = (params.logprobs_mode or self._mode).partition("_")[2]
                alike.setdefault((params.logprobs, unit), []).append(place)
        found: dict[int, TokenLogprobs] = {}
        for (k, unit), places in alike.items():
            own = logits if len(places) == logits.shape[0] else logits[places]
            group = [indices[place] for place in places]
            scored = token_logprobs(
                own,
                [tokens[i] for i in group],
                k,
                self._scores[unit],
                [rows[i].params.logprob_token_ids or () for i in group],
            )
            found.update(zip(group, scored, strict=True))
        return found
