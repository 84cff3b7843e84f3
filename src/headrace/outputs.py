"""What a caller gets back for a prompt: cumulative `RequestOutput` objects, and deltas for streaming."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.stash import Stash

__all__ = [
    "CompletionDelta",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestUpdate",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 is the likeliest of the whole vocabulary."""
    decoded_token: str | None
    """Its own text. A token that holds a part of a character shows U+FFFD for it; None where there is no
    tokenizer or `detokenize=False`."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened: seconds since the epoch, on the front end's clock; None: not yet.

    Over all answers of a request: the first to be scheduled, the first token, the last end.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    """Summed over all answers."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until it was first scheduled."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, the queue included."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        return _between(self.first_token_time, self.finished_time)

    @property
    def total_time(self) -> float | None:
        """Seconds from arrival to the end."""
        return _between(self.arrival_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One answer, as far as it has come."""

    index: int
    """Its number among the `n` answers of the request."""
    text: str = ""
    """What is shown: without hidden special tokens, cut at the stop string."""
    token_ids: list[int] = field(default_factory=list)
    """All ids, hidden ones and the ending one included; ids behind the one that completed a stop string are not
    kept."""
    finish_reason: str | None = None
    """`"stop"`, `"length"`, `"abort"`, `"error"` or a plugin's word; None: it goes on."""
    stop_reason: int | str | None = None
    """The stop string or the id of `stop_token_ids` that ended it; None for an end token, a length, …"""
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry a token id kept, the token itself first; None where they were not asked for."""
    cumulative_logprob: float | None = None
    """Sum over the tokens kept; None where logprobs were not asked for."""
    error: str | None = None
    """What went wrong, where `finish_reason` is `"error"`."""
    error_kind: str = ""
    """`HeadraceError.kind` of it."""
    stash: Stash = field(default_factory=Stash, repr=False)
    """What plugins said of it, the latest word of each."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers, as far as they have come: one object a request, which grows."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if it was given as ids."""
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    outputs: list[CompletionOutput]
    """All `n` answers, by index."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache, for the first answer."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, the first None. Set when all are known, if they were asked for."""
    finished: bool = False
    """Whether every answer is finished."""
    error: str | None = None
    """The text of the first answer that failed."""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one update added to one answer; joined, the deltas give the `CompletionOutput`.

    Ids come at once, text when it is certain to be shown: while a character is incomplete or a stop string may
    have begun, `text` lags behind `token_ids`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not (self.text or self.token_ids or self.finish_reason)


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """A request that got further."""

    output: RequestOutput
    """The request's one cumulative object: later updates change it. Deltas are snapshots."""
    deltas: list[CompletionDelta]
    """What is new, in order; an answer may occur more than once."""
