"""What goes to the workers and comes back: one `StepPlan` and one `StepResult` a step.

A plan carries only differences. A worker keeps, a request, its tokens, its block tables and how far its
KV is valid; that state is always a function of the request and its confirmed ids, because a preempted
request is removed and comes back as new.
"""

from __future__ import annotations

import msgspec

from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash

__all__ = ["Continued", "EngineOutput", "NewRequest", "RequestResult", "StepPlan", "StepResult"]


class NewRequest(msgspec.Struct, kw_only=True):
    """A request this worker does not know: sent whole, once an admission."""

    request_id: str
    token_ids: list[int]
    """All confirmed ids: the prompt and, after a preemption, what was generated."""
    num_prompt_tokens: int
    params: SamplingParams
    start: int
    """Position of the first token to compute; KV below is in the blocks already (a prefix hit)."""
    count: int
    """Tokens to compute in this step: positions [start, start + count)."""
    block_ids: list[list[int]]
    """A KV group: ids for positions [0, start + count), lookahead behind them."""
    stash: Stash = msgspec.field(default_factory=Stash)

    def __repr__(self) -> str:  # tokens are a user's text: they stay out of logs
        return f"NewRequest({self.request_id!r}, tokens={len(self.token_ids)}, [{self.start}, +{self.count}))"


class Continued(msgspec.Struct, array_like=True):
    """A request this worker knows: what changed since the last plan that held it."""

    request_id: str
    start: int
    """Must equal the worker's own count of valid KV. Larger: the plan was sent before a rollback was known;
    the entry is skipped. Smaller: the worker drifted, which is an error."""
    count: int
    new_block_ids: list[list[int]]
    """A KV group: ids to append; an empty list where no group grew."""
    new_token_ids: list[int]
    """Confirmed ids that this worker did not sample itself."""
    num_drafts: int = 0
    """How many of the drafts this worker proposed last are inside [start, start + count)."""

    def __repr__(self) -> str:
        return f"Continued({self.request_id!r}, [{self.start}, +{self.count}), drafts={self.num_drafts})"


class StepPlan(msgspec.Struct, kw_only=True):
    """One step for all workers. Results are taken in the order of `step`."""

    step: int
    new: list[NewRequest] = []
    continued: list[Continued] = []
    removed: list[str] = []
    """Finished, aborted or preempted since the last plan: forget them first."""
    stash: Stash = msgspec.field(default_factory=Stash)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, over all requests."""
        return sum(n.count for n in self.new) + sum(c.count for c in self.continued)

    @property
    def num_requests(self) -> int:
        """Requests with tokens in this step."""
        return len(self.new) + len(self.continued)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a worker."""
        return not (self.new or self.continued or self.removed)


class RequestResult(msgspec.Struct, kw_only=True):
    """What one step did for one request."""

    tokens: list[int] = []
    """Confirmed ids: none for an unfinished prefill chunk, else accepted drafts and one more."""
    num_computed: int
    """Valid KV after the step. Lower than the plan's end: the rest was undone, the only rollback there is.
    Lower than the number of confirmed tokens, so that there is one to go on from (unless nothing is to be drawn:
    `max_tokens` 0)."""
    drafts: list[int] = []
    """Tentative ids for the next step."""
    finish_reason: str | None = None
    """A runner listener ends the request here, with this reason."""
    error: str | None = None
    """The request failed in this step; it is finished with reason `error` and this text."""
    error_kind: str = "engine"
    """`HeadraceError.kind` of that error."""
    stash: Stash = msgspec.field(default_factory=Stash)

    def __repr__(self) -> str:
        return f"RequestResult(tokens={len(self.tokens)}, computed={self.num_computed}, drafts={len(self.drafts)})"


class StepResult(msgspec.Struct, kw_only=True):
    """What a step did: one entry for each request of the plan."""

    step: int
    requests: dict[str, RequestResult]
    stash: Stash = msgspec.field(default_factory=Stash)


class EngineOutput(msgspec.Struct, kw_only=True):
    """What the core tells the front end about one request after one step."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Text for `finish_reason == "error"`."""
    error_kind: str = ""
    """`HeadraceError.kind` of that error: whose fault it was."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None
    """When it was first admitted, in seconds since the epoch."""
    stash: Stash = msgspec.field(default_factory=Stash)
