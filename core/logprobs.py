"""How log-probabilities travel from the sampler to the output processor: in the stash of results and outputs."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.core.stash import StashKey

__all__ = ["LOGPROBS", "PROMPT_LOGPROBS", "LogprobsMode", "PromptLogprobs", "TokenLogprobs"]

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What is told of generated tokens: of the model's logits or of those a token is drawn from, which processors,
temperature and filters changed (-inf where a token cannot be drawn); as log-probabilities or as they are."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """One position: the token that stands there first, then the likeliest ones in falling order."""

    token_ids: list[int]
    """k + 1 ids; the first may occur again among the others."""
    logprobs: list[float]
    rank: int
    """Of the first: 1 is the likeliest."""
    more: list[tuple[int, float, int]] = []
    """Id, log-probability and rank of each of the request's `logprob_token_ids`."""


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Positions [start, start + len(entries)) of a prompt; position 0 has none, so `start` is at least 1.

    After a preemption positions come again, with the same values.
    """

    start: int
    entries: list[TokenLogprobs]


LOGPROBS: StashKey[list[TokenLogprobs]] = StashKey(
    "sampling/logprobs", list[TokenLogprobs], direction="result"
)
"""One entry for each of the result's tokens."""

PROMPT_LOGPROBS: StashKey[PromptLogprobs] = StashKey(
    "sampling/prompt_logprobs", PromptLogprobs, direction="result"
)
