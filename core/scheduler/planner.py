"""Who gets what in a step: running requests first, then as many waiting ones as there is room for."""

from __future__ import annotations

from headrace.core.errors import HeadraceError, PluginError
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.interfaces.kv_cache import PrefixHit
from headrace.core.interfaces.scheduling import Wait
from headrace.core.plan import Continued, NewRequest
from headrace.core.request import Request, RequestState
from headrace.core.scheduler.roster import Roster
from headrace.core.scheduler.snapshot import PREFIX
from headrace.core.scheduler.step import Step

__all__ = ["Planner"]


class Planner:
    """Fills a step from the roster."""

    def __init__(self, build: SchedulerBuild, roster: Roster) -> None:
        self._build = build
        self._kv = build.kv
        self._policy = build.policy
        self._roster = roster
        self._constraints = roster.constraints

    def fill(self, step: Step) -> None:
        """Give out the step's budget."""
        self._constraints.begin(step.plan)
        asked = self._roster.unpark()
        self._roster.queue.refresh()
        self._schedule_running(step)
        if step.admits:
            self._admit(step)
        self._roster.park_again(asked)

    # Running requests --------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> None:
        # Decodes first: a long prompt among the running ones must not starve them.
        decodes: list[Request] = []
        long: list[Request] = []
        for request in self._roster.running:
            (long if len(request.token_ids) - request.num_scheduled > 1 else decodes).append(request)
        step.spare = max(0, step.budget - len(decodes))
        if long or self._roster.queue:
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
        if threshold and len(self._roster) > 1:
            count = min(count, threshold)
        if not self._constraints:
            return count
        try:
            answer = self._constraints.limit(request, start, count)
        except HeadraceError as error:
            self._roster.fail(request, error)
            return 0
        if isinstance(answer, Wait):
            self._roster.park(request, answer.reason)
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
            holders = self._roster.running + [parked for parked in self._roster.parked if parked.block_ids]
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
            self._roster.fail(request, error)

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
        while step.budget and self._roster.queue:
            request = self._roster.queue.peek()
            if request.num_in_flight and not request.block_ids:
                return  # preempted, and tokens of its are still under way: it goes first, once they are known
            if len(self._roster.running) >= self._build.max_num_seqs:
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
                self._roster.park(request, PREFIX)
                return True
            if request.wait_reason == PREFIX:
                request.wait_reason = None
            start = hit.length
        # Without drafts: who has them was parked, and may find the pool so full that only its next token fits.
        wanted = request.num_known - len(request.drafts) - start
        count = self._limit_count(request, start, min(wanted, step.budget))
        blocks: list[list[int]] | None = None
        if count and request.state is RequestState.WAITING and self._fits(request, hit, step):
            blocks = self._allocate(request, start + count, hit)
        if blocks is None:
            if hit is not None:
                self._kv.release(hit)
            if request.state is not RequestState.WAITING:
                return True
            if count:
                self._make_way(request, step)
            return False
        self._roster.admit(request)
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
            step.reserved = sum(self._lacks(other) for other in self._roster.running)
        wanted = min(request.num_tokens + self._build.lookahead, request.max_tokens_total)
        need = self._kv.shortfall(request, wanted)
        if hit is not None:
            need -= sum(1 for table in hit.block_ids for block in table if block)
        # Who comes back from a preemption waits until the others have room to grow, or it would go again.
        headroom = len(self._roster.running) if request.was_preempted else 0
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
        victim = self._victim(self._roster.running, request) if self._roster.running else None
        if victim is None and not self._roster.running:
            # Who was parked while it ran keeps its blocks, also once it waits in the queue again.
            idle = [*self._roster.parked, *self._roster.queue]
            victim = next((other for other in idle if other.block_ids and other is not request), None)
        if victim is not None:
            self._preempt(victim, step)

    # Preemption --------------------------------------------------------------------------------------

    def _preempt(self, victim: Request, step: Step) -> None:
        self._take_back(victim, step)
        step.admits = False
        self._roster.restart(victim)

    def _take_back(self, request: Request, step: Step) -> None:
        """Take a request out of the plan again, if it is in it."""
        entry = step.entries.pop(request.request_id, None)
        if entry is not None:
            step.budget += entry.count
            request.num_in_flight -= 1
            request.on_worker = not isinstance(entry, NewRequest)
            self._constraints.revoke(request, step.plan)
