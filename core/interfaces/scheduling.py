"""The scheduling contracts: the scheduler, its policy, what lowers a token count, and who listens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace.core.errors import HeadraceError
    from headrace.core.plan import EngineOutput, StepPlan, StepResult
    from headrace.core.request import EngineRequest, FinishReason, Request

__all__ = ["Constraint", "EngineListener", "Scheduler", "SchedulingPolicy", "Wait"]


@runtime_checkable
class Scheduler(Protocol):
    """Decides what each step computes. Called on the engine's thread only; no method blocks."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` where it can never be served."""
        ...

    def schedule(self) -> StepPlan:
        """Plan the next step; an empty plan when nothing can run now."""
        ...

    def take_failures(self) -> list[EngineOutput]:
        """Return the outputs of requests that failed while plans were made; called after `schedule`."""
        ...

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of `plan`; called in the order of `plan.step`."""
        ...

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, error: HeadraceError | None = None
    ) -> list[EngineOutput]:
        """End requests from outside, in whatever state; unknown and finished ids are passed over.

        error: what to say where the reason is `error`.
        """
        ...

    def fail_plan(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """A step raised: end the requests of `plan` with reason `error`."""
        ...

    def restart(self) -> None:
        """Workers forgot every request, and plans in flight are void: what ran starts again, tokens kept.

        KV memory is as it was: what is in the prefix cache stays there.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or a worker must still be told that one is gone."""
        ...

    @property
    def num_parked(self) -> int:
        """Requests that a constraint told to wait."""
        ...

    def pause(self) -> None:
        """Schedule nothing until `resume`; requests are still taken in."""
        ...

    def resume(self) -> None:
        """End `pause`."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds: requests may wait then without anything being wrong."""
        ...

    def reset_prefix_cache(self) -> bool:
        """See `KVCacheManager.reset_prefix_cache`."""
        ...

    def check_integrity(self) -> None:
        """Raise `EngineError` where the books do not balance; called when idle."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Who runs, who waits and why, blocks: plain values for a person or a log."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name, without prefix."""
        ...


class SchedulingPolicy(Protocol):
    """Who goes first and who gives way: what most people mean by "my own scheduler"."""

    dynamic: bool
    """Whether `order` depends on `now`; the queue is sorted anew each step then."""

    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        """Sort key in the queue, smallest first; unique, so end it with arrival and id."""
        ...

    def victim(self, running: Sequence[Request], wanting: Request) -> Request | None:
        """Who is preempted so that `wanting` gets blocks (or, if it waits, a place).

        `running` is in the order of admission. Return one of them, `wanting` itself if it runs and should
        give way, or None: `wanting` waits. None is final for a waiting request; for a running one it means
        `wanting` itself.
        """
        ...


@dataclass(frozen=True)
class Wait:
    """A constraint's answer: park the request, and ask again later."""

    reason: str


class Constraint:
    """Lowers the number of tokens a request gets in a step, or parks it. Override what you need.

    Slow work starts in `on_add`, says `Wait`, and calls the thread-safe `engine.wake()` when done. Any method
    may raise `RequestError` or `OverloadedError` to fail that request; any other exception fails it too, by plugin
    name.
    """

    name = "constraint"

    def on_add(self, request: Request) -> None:
        """A request arrived. Where another constraint or the policy refuses it afterwards, `on_finish` is called."""

    def begin(self, plan: StepPlan) -> None:
        """A new step is planned: reset what is counted a step."""

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        """At most how many of the tokens [start, start + count) may run now. Called before blocks are granted."""
        return count

    def commit(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Blocks were granted and the tokens are in `plan`; set stash entries here."""

    def revoke(self, request: Request, plan: StepPlan) -> None:
        """A request committed in this plan was preempted in it after all."""

    def on_finish(self, request: Request) -> None:
        """The request is gone."""

    def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name, without prefix; see `headrace.core.metrics`."""
        return {}


class EngineListener:
    """Hears what the engine does; changes nothing. Override what you need.

    An exception fails the requests of the step it was called for, by plugin name.
    """

    name = "listener"

    def on_add(self, request: Request) -> None:
        """A request was queued."""

    def on_plan(self, plan: StepPlan) -> None:
        """A plan is about to be sent."""

    def on_preempt(self, request: Request) -> None:
        """A running request lost its blocks."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """A result arrived, before it is taken in."""

    def on_finish(self, request: Request) -> None:
        """A request ended; `finish_reason` says how."""

    def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name, without prefix; see `headrace.core.metrics`."""
        return {}

    def close(self) -> None:
        """The engine ends: let go of files and threads. May be called twice."""
