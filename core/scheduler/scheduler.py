"""The unified token scheduler.

There is no prefill phase and no decode phase. A request has `num_known` tokens, confirmed and tentative; of
those, `num_scheduled` are in plans sent; a step gives it some of the difference. That covers whole prompts,
chunks of prompts, single tokens, drafts and prefix hits alike. A feature lowers the number (`Constraint`).

Running requests come before waiting ones. A running request that gets no blocks preempts the policy's victim:
its blocks are freed, it starts again from nothing and keeps its confirmed tokens. Nobody is admitted in a step
that preempted. A waiting request is admitted when its whole prompt fits beside what the running ones still need
for theirs, so that a long prompt is not begun, evicted and begun again.

Drafts are guesses: they get what is left of a step once every running request has its next token, half of that while
prompts wait for it, and blocks that are free; nobody is preempted for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.plan import EngineOutput, StepPlan, StepResult
from headrace.core.request import EngineRequest, FinishReason, Request
from headrace.core.scheduler.limits import RequestLimits
from headrace.core.scheduler.planner import Planner
from headrace.core.scheduler.results import ResultIntake
from headrace.core.scheduler.roster import Roster
from headrace.core.scheduler.snapshot import snapshot, waiting_by_reason
from headrace.core.scheduler.step import Step

__all__ = ["UnifiedScheduler"]


class UnifiedScheduler:
    """Implements `Scheduler`; the contract's docstrings hold.

    The roster knows where each request stands, the planner fills steps from it, the intake takes results into it.
    """

    def __init__(self, build: SchedulerBuild) -> None:
        self._kv = build.kv
        self._budget = build.max_num_batched_tokens
        self._limits = RequestLimits(build)
        self._roster = Roster(build)
        self._planner = Planner(build, self._roster)
        self._intake = ResultIntake(build.kv, self._roster)
        self._paused = False

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        most = self._limits.check(request)
        self._roster.add(Request(request, max_tokens_total=most, first_step=self._roster.next_step))

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, error: HeadraceError | None = None
    ) -> list[EngineOutput]:
        """End requests from outside, in whatever state."""
        found = [request for name in dict.fromkeys(request_ids) if (request := self._roster.get(name))]
        return [self._roster.end(request, reason, error) for request in found]

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        step = Step(self._roster.next_step, self._budget)
        if not self._paused:
            self._planner.fill(step)
        plan = step.finish(self._roster.take_removed())
        if not plan.is_empty:
            self._roster.next_step += 1
        return plan

    def take_failures(self) -> list[EngineOutput]:
        """Return the outputs of requests that failed while plans were made."""
        return self._roster.take_failed()

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of `plan`."""
        return self._intake.take(plan, result)

    def fail_plan(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """A step raised: end its requests."""
        return self._intake.fail(plan, error)

    def restart(self) -> None:
        """Workers forgot every request, and plans in flight are void."""
        self._roster.restart_all()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or a worker must still be told that one is gone."""
        return self._roster.has_work

    @property
    def num_parked(self) -> int:
        """Requests that a constraint told to wait."""
        return len(self._roster.parked)

    def pause(self) -> None:
        """Schedule nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds."""
        return self._paused

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while any is held."""
        return self._kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise `EngineError` where the books do not balance."""
        self._kv.check_integrity(list(self._roster))

    def snapshot(self) -> dict[str, Any]:
        """Who runs, who waits and why, blocks."""
        roster = self._roster
        return snapshot(running=roster.running, waiting=roster.queue, parked=roster.parked, kv=self._kv)

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name."""
        roster = self._roster
        return {
            "num_requests_running": len(roster.running),
            "num_requests_waiting": len(roster.queue) + len(roster.parked),
            "num_preemptions": roster.num_preemptions,
            **waiting_by_reason(roster.parked, num_queued=len(roster.queue)),
            **self._kv.metrics(),
            **roster.constraints.metrics(),
        }
