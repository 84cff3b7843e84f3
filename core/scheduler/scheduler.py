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

import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import EngineError, HeadraceError, PluginError, RequestError, error_of
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.interfaces.kv_cache import PrefixHit
from headrace.core.interfaces.scheduling import EngineListener, Wait
from headrace.core.plan import Continued, EngineOutput, NewRequest, RequestResult, StepPlan, StepResult
from headrace.core.request import EngineRequest, FinishReason, Request, RequestState
from headrace.core.scheduler.constraints import Constraints
from headrace.core.scheduler.limits import RequestLimits, append_tokens
from headrace.core.scheduler.queue import RequestQueue
from headrace.core.scheduler.snapshot import PREFIX, snapshot, waiting_by_reason
from headrace.core.scheduler.step import Step

__all__ = ["UnifiedScheduler"]


class UnifiedScheduler:
    """Implements `Scheduler`; the contract's docstrings hold."""

    def __init__(self, build: SchedulerBuild) -> None:
        self._build = build
        self._kv = build.kv
        self._policy = build.policy
        self._constraints = Constraints(build.constraints)
        self._listener = build.listener or EngineListener()
        self._queue = RequestQueue(build.policy)
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._parked: list[Request] = []
        self._removed: list[str] = []
        self._failed: list[EngineOutput] = []
        self._next_step = 0
        self._num_admissions = 0
        self._num_preemptions = 0
        self._paused = False
        self._limits = RequestLimits(build)

    # Requests come and go ----------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        if request.request_id in self._requests:
            raise RequestError(f"a request with the id {request.request_id!r} is being served already")
        added = Request(request, max_tokens_total=self._limits.check(request), first_step=self._next_step)
        self._constraints.on_add(added)
        try:
            self._queue.push(added)
        except HeadraceError:
            self._constraints.on_finish(added)
            raise
        self._requests[request.request_id] = added
        self._listener.on_add(added)

    def finish(
        self, request_ids: Sequence[str], reason: FinishReason, error: HeadraceError | None = None
    ) -> list[EngineOutput]:
        """End requests from outside, in whatever state."""
        found = [self._requests[name] for name in dict.fromkeys(request_ids) if name in self._requests]
        return [self._end(request, reason, error) for request in found]

    def _end(
        self, request: Request, reason: FinishReason, error: HeadraceError | None = None
    ) -> EngineOutput:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request.state is RequestState.PARKED:
            self._parked.remove(request)
        elif request.state is RequestState.WAITING:
            self._queue.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._release(request)
        del self._requests[request.request_id]
        self._constraints.on_finish(request)
        self._listener.on_finish(request)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            error=None if error is None else str(error),
            error_kind="" if error is None else error.kind,
            num_cached_tokens=request.num_cached,
            num_preemptions=request.num_preemptions,
        )

    def _release(self, request: Request) -> None:
        """Give back its blocks, behind the fence, and have workers forget it."""
        if request.block_ids:
            self._kv.free(request, fence=self._next_step - 1)
        if request.on_worker:
            self._removed.append(request.request_id)
            request.on_worker = False

    # A step is planned -------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        step = Step(self._next_step, 0 if self._paused else self._build.max_num_batched_tokens)
        if step.budget:
            self._constraints.begin(step.plan)
            asked = self._unpark()
            self._queue.refresh()
            self._schedule_running(step)
            if step.admits:
                self._admit(step)
            self._park_again(asked)
        removed, self._removed = self._removed, []
        plan = step.finish(removed)
        if not plan.is_empty:
            self._next_step += 1
        return plan

    def _schedule_running(self, step: Step) -> None:
        # Decodes first: a long prompt among the running ones must not starve them.
        decodes: list[Request] = []
        long: list[Request] = []
        for request in self._running:
            (long if len(request.token_ids) - request.num_scheduled > 1 else decodes).append(request)
        step.spare = max(0, step.budget - len(decodes))
        if long or self._queue:
            step.spare //= 2  # the rest is for prompts
        for request in decodes:
            self._continue(request, step)
        for request in long:
            self._continue(request, step)

    def _continue(self, request: Request, step: Step) -> None:
        """Give a running request its tokens of this step, if it wants any."""
        start = request.num_scheduled
        count = min(request.num_known - start, step.budget)
        if count <= 0 or request.state is not RequestState.RUNNING:
            return
        confirmed = min(count, len(request.token_ids) - start)
        if request.drafts:
            count = min(count, confirmed + step.spare)
        count = self._limit_count(request, start, count)
        if count == 0:
            return
        if request.drafts and count > confirmed:
            blocks = self._allocate(request, start + count)
            if blocks is not None:
                step.spare -= count - confirmed
                self._send(request, start, count, blocks, step)
                return
            count = confirmed
        blocks = self._grant(request, start + count, step)
        if blocks is not None:
            self._send(request, start, count, blocks, step)

    def _allocate(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None
    ) -> list[list[int]] | None:
        """Ask for blocks up to `num_tokens`, with what the proposer needs of the request's places behind them."""
        lookahead = min(self._build.lookahead, max(0, request.max_tokens_total - num_tokens))
        return self._kv.allocate(request, num_tokens, lookahead=lookahead, hit=hit)

    def _limit_count(self, request: Request, start: int, count: int) -> int:
        """Let threshold and constraints lower `count`; 0 also where the request was parked or failed."""
        threshold = self._build.long_prefill_token_threshold
        if threshold and len(self._requests) > 1:
            count = min(count, threshold)
        if not self._constraints:
            return count
        try:
            answer = self._constraints.limit(request, start, count)
        except HeadraceError as error:
            self._failed.append(self._end(request, "error", error))
            return 0
        if isinstance(answer, Wait):
            self._park(request, answer.reason)
            return 0
        request.wait_reason = None
        return answer

    def _grant(self, request: Request, num_tokens: int, step: Step) -> list[list[int]] | None:
        """Allocate blocks for a running request, at the cost of victims; None: not in this step."""
        while True:
            blocks = self._allocate(request, num_tokens)
            if blocks is not None:
                return blocks
            step.admits = False
            if self._kv.num_fenced:
                return None  # plans in flight give blocks back soon; preempting more would be waste
            holders = self._running + [parked for parked in self._parked if parked.block_ids]
            victim = self._victim(holders, request) or request
            self._preempt(victim, step)
            if victim is request:
                return None

    def _victim(self, holders: list[Request], wanting: Request) -> Request | None:
        victim = self._policy.victim(holders, wanting)
        if victim is not None and not any(victim is holder for holder in holders):
            name = type(self._policy).__name__
            raise PluginError(
                f"scheduling policy {name} chose the victim {victim!r}, which is none of the {len(holders)} running "
                "requests it was offered",
                plugin=name,
            )
        return victim

    def _send(
        self, request: Request, start: int, count: int, new_blocks: list[list[int]], step: Step
    ) -> None:
        """Put [start, start + count) of a request into the plan."""
        end = start + count
        request.num_scheduled = end
        request.num_in_flight += 1
        num_drafts = 0
        if request.drafts:
            num_drafts = max(0, end - len(request.token_ids))
            del request.drafts[num_drafts:]
        if request.on_worker:
            new_tokens = request.token_ids[request.worker_tokens :]
            step.entries[request.request_id] = Continued(
                request.request_id, start, count, new_blocks, new_tokens, num_drafts
            )
        else:
            request.on_worker = True
            step.entries[request.request_id] = NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                start=start,
                count=count,
                block_ids=[list(table) for table in request.block_ids],
                stash=request.stash,
            )
        request.worker_tokens = len(request.token_ids)
        step.budget -= count
        self._expect_token(request)
        try:
            self._constraints.commit(request, start, count, step.plan)
        except HeadraceError as error:
            self._take_back(request, step)
            self._failed.append(self._end(request, "error", error))

    def _expect_token(self, request: Request) -> None:
        """Where workers run ahead, count the token this plan will sample as known already."""
        known = len(request.token_ids) + request.num_expected
        if (
            self._build.runs_ahead
            and not request.drafts
            and request.num_scheduled == known
            and known + 1 < request.max_tokens_total
        ):
            request.num_expected += 1

    # Admission ---------------------------------------------------------------------------------------

    def _admit(self, step: Step) -> None:
        while step.budget and self._queue:
            request = self._queue.peek()
            if request.num_in_flight and not request.block_ids:
                return  # preempted, and tokens of its are still under way: it goes first, once they are known
            if len(self._running) >= self._build.max_num_seqs:
                if request.wait_reason is None or self._limit_count(request, request.num_scheduled, 1):
                    self._make_way(request, step)
                if request.state is RequestState.WAITING:
                    return
                continue
            if not self._admit_one(request, step):
                return

    def _admit_one(self, request: Request, step: Step) -> bool:
        """Admit, park or fail the first in the queue; False: it stays, and nobody behind it is admitted."""
        hit: PrefixHit | None = None
        start = request.num_scheduled
        if not request.block_ids and request.engine_request.reads_prefix_cache:
            hit = self._kv.match_prefix(request)
            if hit.coming:
                # Computing the block beside the request that is at it would be double work.
                self._kv.release(hit)
                self._park(request, PREFIX)
                return True
            if request.wait_reason == PREFIX:
                request.wait_reason = None
            start = hit.length
        count = self._limit_count(request, start, min(request.num_known - start, step.budget))
        blocks: list[list[int]] | None = None
        fits = False
        if count and request.state is RequestState.WAITING:
            fits = self._fits(request, hit, step)
            if fits:
                blocks = self._allocate(request, start + count, hit)
        if blocks is None:
            if hit is not None:
                self._kv.release(hit)
            if request.state is not RequestState.WAITING:
                return True
            if count and not fits:
                self._make_way(request, step)
            return False
        self._queue.remove(request)
        self._running.append(request)
        request.state = RequestState.RUNNING
        self._num_admissions += 1
        request.admission = self._num_admissions
        request.scheduled_time = request.scheduled_time or time.time()
        if hit is not None:
            request.num_computed = hit.length
            if not request.was_preempted:
                request.num_cached = hit.length
        self._send(request, start, count, blocks, step)
        if request.state is RequestState.RUNNING:
            step.reserved = (step.reserved or 0) + self._lacks(request)
        return True

    def _fits(self, request: Request, hit: PrefixHit | None, step: Step) -> bool:
        """Whether all of a waiting request fits beside what the running ones still lack for their prompts."""
        if step.reserved is None:
            step.reserved = sum(self._lacks(other) for other in self._running)
        wanted = min(request.num_tokens + self._build.lookahead, request.max_tokens_total)
        need = self._kv.shortfall(request, wanted)
        if hit is not None:
            need -= sum(1 for table in hit.block_ids for block in table if block)
        # Who comes back from a preemption waits until the others have room to grow, or it would go again.
        headroom = len(self._running) if request.was_preempted else 0
        return need + step.reserved + headroom <= self._kv.num_free

    def _lacks(self, request: Request) -> int:
        """Blocks a running request still needs for its prompt."""
        if request.num_scheduled >= len(request.token_ids):
            return 0
        return self._kv.shortfall(request, len(request.token_ids))

    def _make_way(self, request: Request, step: Step) -> None:
        """A waiting request finds no place: preempt for it if the policy says so, or if nothing else moves."""
        if self._kv.num_fenced:
            return
        victim = self._victim(self._running, request) if self._running else None
        if victim is None and not self._running:
            # Who was parked while it ran keeps its blocks, also once it waits in the queue again.
            idle = [*self._parked, *self._queue]
            victim = next((other for other in idle if other.block_ids and other is not request), None)
        if victim is not None:
            self._preempt(victim, step)

    def _park(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            self._queue.remove(request)
        request.state = RequestState.PARKED
        request.wait_reason = reason
        self._parked.append(request)

    def _unpark(self) -> list[Request]:
        """Ask again: parked requests stand in the queue's order once more. Returns who they are."""
        parked, self._parked = self._parked, []
        for request in parked:
            request.state = RequestState.WAITING
            self._queue.push(request)
        return parked

    def _park_again(self, asked: list[Request]) -> None:
        """Who was not reached in the queue waits on for the reason known."""
        for request in asked:
            if request.state is RequestState.WAITING and request.wait_reason is not None:
                self._park(request, request.wait_reason)

    # Preemption --------------------------------------------------------------------------------------

    def _preempt(self, victim: Request, step: Step) -> None:
        self._take_back(victim, step)
        step.admits = False
        self._restart(victim)

    def _take_back(self, request: Request, step: Step) -> None:
        """Take a request out of the plan again, if it is in it."""
        entry = step.entries.pop(request.request_id, None)
        if entry is not None:
            step.budget += entry.count
            request.num_in_flight -= 1
            request.on_worker = not isinstance(entry, NewRequest)
            self._constraints.revoke(request, step.plan)

    def _restart(self, request: Request) -> None:
        """Take everything computed from a request; its confirmed tokens stay."""
        self._release(request)
        request.num_scheduled = request.num_computed = request.num_expected = 0
        request.drafts = []
        request.valid_from_step = self._next_step
        request.num_preemptions += 1
        self._num_preemptions += 1
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            request.state = RequestState.WAITING
            self._queue.push(request)
        elif request.state is RequestState.WAITING:
            self._queue.remove(request)  # its place changes with its history
            self._queue.push(request)
        self._listener.on_preempt(request)

    def restart(self) -> None:
        """Workers forgot every request, and plans in flight are void."""
        self._kv.advance_fence(self._next_step - 1)
        for request in list(self._requests.values()):
            request.num_in_flight = 0
            if request.on_worker:
                self._restart(request)
        self._removed.clear()

    # A result is taken in ----------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of `plan`."""
        self._kv.advance_fence(plan.step)
        outputs, self._failed = self._failed, []
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        for entry in entries:
            request = self._requests.get(entry.request_id)
            if request is None or plan.step < request.first_step:
                continue  # it finished while the step ran: late results are dropped
            request.num_in_flight -= 1
            output = self._take_in(request, entry, result.requests[entry.request_id], plan.step)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail_plan(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """A step raised: end its requests."""
        self._kv.advance_fence(plan.step)
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        found = [self._requests[e.request_id] for e in entries if e.request_id in self._requests]
        return [self._end(request, "error", EngineError(error)) for request in found]

    def _take_in(
        self, request: Request, entry: NewRequest | Continued, outcome: RequestResult, step: int
    ) -> EngineOutput | None:
        if outcome.error is not None:
            return self._end(request, "error", error_of(outcome.error_kind, outcome.error))
        current = step >= request.valid_from_step
        if current:
            self._take_progress(request, entry, outcome)
        first_new = len(request.token_ids)
        reason = append_tokens(request, outcome.tokens)
        if outcome.finish_reason and len(request.token_ids) - first_new == len(outcome.tokens):
            # The last token has both reasons: who ended the answer knows that it is whole.
            reason = outcome.finish_reason
        if request.params.max_tokens == 0 and request.num_computed >= request.num_prompt_tokens:
            reason = reason or "length"  # only the prompt was to be computed
        new_ids = request.token_ids[first_new:]
        request.worker_tokens = len(request.token_ids)
        if current and request.block_ids:
            self._kv.publish(request, request.num_computed, fence=self._next_step - 1)
        if reason is not None:
            output = self._end(request, reason)
        elif new_ids or outcome.stash:
            output = EngineOutput(
                request_id=request.request_id,
                num_cached_tokens=request.num_cached,
                num_preemptions=request.num_preemptions,
            )
        else:
            output = None
        if output is not None:
            output.scheduled_time = request.scheduled_time
            output.new_token_ids = new_ids
            output.stash = outcome.stash
        if current and request.on_worker and not request.num_in_flight:
            room = request.max_tokens_total - 1 - len(request.token_ids)
            request.drafts = list(outcome.drafts[: max(0, room)])
        return output

    def _take_progress(self, request: Request, entry: NewRequest | Continued, outcome: RequestResult) -> None:
        """Move `num_computed`; going back is the only rollback there is."""
        computed = outcome.num_computed
        lost = computed < request.num_computed
        if computed < entry.start + entry.count:
            request.num_scheduled = computed
            request.num_expected = 0
            # Plans already sent start behind this point; workers skip them, and so do we.
            request.valid_from_step = self._next_step
        elif outcome.tokens and request.num_expected:
            request.num_expected -= 1
        request.drafts = []
        if lost:
            self._kv.forget(request, computed)
            self._restart(request)
        else:
            request.num_computed = computed

    # The rest of the contract ------------------------------------------------------------------------

    def take_failures(self) -> list[EngineOutput]:
        """Return the outputs of requests that failed while plans were made."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or a worker must still be told that one is gone."""
        return bool(self._requests or self._removed or self._failed)

    @property
    def num_parked(self) -> int:
        """Requests that a constraint told to wait."""
        return len(self._parked)

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
        self._kv.check_integrity(list(self._requests.values()))

    def snapshot(self) -> dict[str, Any]:
        """Who runs, who waits and why, blocks."""
        return snapshot(running=self._running, waiting=self._queue, parked=self._parked, kv=self._kv)

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name."""
        return {
            "num_requests_running": len(self._running),
            "num_requests_waiting": len(self._queue) + len(self._parked),
            "num_preemptions": self._num_preemptions,
            **waiting_by_reason(self._parked, num_queued=len(self._queue)),
            **self._kv.metrics(),
            **self._constraints.metrics(),
        }
