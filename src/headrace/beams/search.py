"""Beam search over one prompt: which beginnings are followed, which are finished, and when it is over.

The rules are those of Hugging Face transformers (`num_beams`, `early_stopping=False`), so that scores agree. In each
step all continuations of the running beams are put in order of their sums of log-probabilities:

- a continuation that ends (with an end token, or because `max_tokens` is reached) is finished if it is among the
  first `width`, else it is dropped;
- the first `width` of the others run on;
- of finished ones the `width` best by score are kept. Once there are so many, and the best running beam would not
  reach the worst of them if it ended now, the search is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.beams.params import BeamSearchParams
from headrace.outputs import Logprob

__all__ = ["Beam", "BeamSearch"]

Candidates = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer, or a finished one."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """Summed over the tokens."""
    candidates: tuple[Candidates, ...] = ()
    """What stood to choice at each token."""
    ended: bool = False
    """With an end token."""


class BeamSearch:
    """One search. Ask `running` for continuations and hand them to `advance` until it `is_over`.

    eos_token_ids: ids that end an answer. max_tokens: with the context's end in mind.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Collection[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._finished: list[Beam] = []
        self.running: list[Beam] = [Beam()]

    @property
    def num_candidates(self) -> int:
        """How many of a beam's likeliest continuations `advance` has to see: all may be needed, or end."""
        return self._params.beam_width + max(1, len(self._eos))

    @property
    def is_over(self) -> bool:
        """Nothing can be changed about the results."""
        return not self.running

    @property
    def results(self) -> list[Beam]:
        """The finished beams, best score first."""
        return list(self._finished)

    def score(self, beam: Beam) -> float:
        """Return what finished beams are ordered by."""
        return self._params.score(beam.logprob, len(beam.token_ids))

    def advance(self, continuations: Sequence[Candidates]) -> None:
        """Go a token further. continuations: one mapping a running beam, from token id to log-probability."""
        width = self._params.beam_width
        options = [
            (beam.logprob + candidate.logprob, place, token_id)
            for place, (beam, own) in enumerate(zip(self.running, continuations, strict=True))
            for token_id, candidate in own.items()
            if candidate.logprob > -math.inf
        ]
        options.sort(key=lambda option: (-option[0], option[1], option[2]))
        length = len(self.running[0].token_ids) + 1
        before, self.running = self.running, []
        for rank, (logprob, place, token_id) in enumerate(options):
            ended = token_id in self._eos
            goes_on = not ended and length < self._max_tokens
            if (goes_on and len(self.running) == width) or (not goes_on and rank >= width):
                continue
            beam = Beam(
                (*before[place].token_ids, token_id),
                logprob,
                (*before[place].candidates, continuations[place]),
                ended,
            )
            (self.running if goes_on else self._finished).append(beam)
        self._finished = sorted(self._finished, key=self.score, reverse=True)[:width]
        full = len(self._finished) == width
        if full and self.running and self.score(self.running[0]) <= self.score(self._finished[-1]):
            self.running = []
