"""What results change: tokens are appended, positions move, drafts are kept, requests end."""

from __future__ import annotations

from headrace.core.errors import EngineError, error_of
from headrace.core.interfaces.kv_cache import KVCacheManager
from headrace.core.plan import Continued, EngineOutput, NewRequest, RequestResult, StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.scheduler.limits import append_tokens
from headrace.core.scheduler.roster import Roster

__all__ = ["ResultIntake"]


class ResultIntake:
    """Takes results into the roster's requests, in the order of their plans."""

    def __init__(self, kv: KVCacheManager, roster: Roster) -> None:
        self._kv = kv
        self._roster = roster

    def take(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take in the result of `plan`; return what clients are told."""
        self._kv.advance_fence(plan.step)
        outputs = self._roster.take_failed()
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        for entry in entries:
            request = self._roster.get(entry.request_id)
            if request is None or plan.step < request.first_step:
                continue  # it finished while the step ran: late results are dropped
            request.num_in_flight -= 1
            output = self._take_in(request, entry, result.requests[entry.request_id], plan.step)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """`plan` raised: end its requests."""
        self._kv.advance_fence(plan.step)
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        found = [request for entry in entries if (request := self._roster.get(entry.request_id))]
        return [self._roster.end(request, "error", EngineError(error)) for request in found]

    def _take_in(
        self, request: Request, entry: NewRequest | Continued, outcome: RequestResult, step: int
    ) -> EngineOutput | None:
        if outcome.error is not None:
            return self._roster.end(request, "error", error_of(outcome.error_kind, outcome.error))
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
            self._kv.publish(request, request.num_computed, fence=self._roster.fence)
        if reason is not None:
            output = self._roster.end(request, reason)
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
            request.valid_from_step = self._roster.next_step
        elif outcome.tokens and request.num_expected:
            request.num_expected -= 1
        request.drafts = []
        if lost:
            self._kv.forget(request, computed)
            self._roster.restart(request)
        else:
            request.num_computed = computed
