"""Where every request stands, and how it moves: queued, running, parked, gone."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headrace.core.errors import HeadraceError, RequestError
from headrace.core.interfaces.build import SchedulerBuild
from headrace.core.interfaces.scheduling import EngineListener
from headrace.core.plan import EngineOutput
from headrace.core.request import FinishReason, Request, RequestState
from headrace.core.scheduler.constraints import Constraints
from headrace.core.scheduler.queue import RequestQueue

__all__ = ["Roster"]


class Roster:
    """All requests of a scheduler.

    A request changes its place by a method here and nowhere else, so that lists, blocks, constraints and listeners
    always agree on it.
    """

    def __init__(self, build: SchedulerBuild) -> None:
        self._kv = build.kv
        self._listener = build.listener or EngineListener()
        self._requests: dict[str, Request] = {}
        self._removed: list[str] = []
        self._failed: list[EngineOutput] = []
        self._num_admissions = 0
        self.constraints = Constraints(build.constraints)
        self.queue = RequestQueue(build.policy)
        self.running: list[Request] = []
        """In the order of admission."""
        self.parked: list[Request] = []
        self.next_step = 0
        """Number of the next plan sent."""
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """Return an unfinished request."""
        return self._requests.get(request_id)

    @property
    def fence(self) -> int:
        """The last plan sent: once it is updated, nobody computes in blocks that were freed by now."""
        return self.next_step - 1

    # Coming and going --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` where its id is taken, and what constraints and policy raise."""
        if request.request_id in self._requests:
            raise RequestError(f"a request with the id {request.request_id!r} is being served already")
        self.constraints.on_add(request)
        try:
            self.queue.push(request)
        except HeadraceError:
            self.constraints.on_finish(request)
            raise
        self._requests[request.request_id] = request
        self._listener.on_add(request)

    def end(self, request: Request, reason: FinishReason, error: HeadraceError | None = None) -> EngineOutput:
        """End a request wherever it stands; returns what its client is told."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.PARKED:
            self.parked.remove(request)
        elif request.state is RequestState.WAITING:
            self.queue.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._release(request)
        del self._requests[request.request_id]
        self.constraints.on_finish(request)
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

    def fail(self, request: Request, error: HeadraceError) -> None:
        """End a request while a plan is made; `take_failed` has what its client is told."""
        self._failed.append(self.end(request, "error", error))

    def take_failed(self) -> list[EngineOutput]:
        """Return the outputs of `fail`, once."""
        failed, self._failed = self._failed, []
        return failed

    def take_removed(self) -> list[str]:
        """Return, once, whom workers are to forget."""
        removed, self._removed = self._removed, []
        return removed

    @property
    def has_work(self) -> bool:
        """Whether anybody is here, or somebody is still to be told of who left."""
        return bool(self._requests or self._removed or self._failed)

    # Moving ------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """From the queue to the running ones."""
        self.queue.remove(request)
        self.running.append(request)
        request.state = RequestState.RUNNING
        self._num_admissions += 1
        request.admission = self._num_admissions
        request.scheduled_time = request.scheduled_time or time.time()

    def park(self, request: Request, reason: str) -> None:
        """From running or queued to those that wait to be asked again."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.queue.remove(request)
        request.state = RequestState.PARKED
        request.wait_reason = reason
        self.parked.append(request)

    def unpark(self) -> list[Request]:
        """Let parked requests stand in the queue's order once more. Returns who they are."""
        parked, self.parked = self.parked, []
        for request in parked:
            request.state = RequestState.WAITING
            self.queue.push(request)
        return parked

    def park_again(self, asked: list[Request]) -> None:
        """Who was not reached in the queue waits on for the reason known."""
        for request in asked:
            if request.state is RequestState.WAITING and request.wait_reason is not None:
                self.park(request, request.wait_reason)

    def restart(self, request: Request) -> None:
        """Take everything computed from a request; its confirmed tokens stay, and it waits to run anew."""
        self._release(request)
        request.num_scheduled = request.num_computed = request.num_expected = 0
        request.drafts = []
        request.valid_from_step = self.next_step
        request.num_preemptions += 1
        self.num_preemptions += 1
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            request.state = RequestState.WAITING
            self.queue.push(request)
        elif request.state is RequestState.WAITING:
            self.queue.remove(request)  # its place changes with its history
            self.queue.push(request)
        self._listener.on_preempt(request)

    def restart_all(self) -> None:
        """Workers forgot every request, and plans in flight are void."""
        self._kv.advance_fence(self.fence)
        for request in list(self._requests.values()):
            request.num_in_flight = 0
            if request.on_worker:
                self.restart(request)
        self._removed.clear()

    def _release(self, request: Request) -> None:
        """Give back its blocks, behind the fence, and have workers forget it."""
        if request.block_ids:
            self._kv.free(request, fence=self.fence)
        if request.on_worker:
            self._removed.append(request.request_id)
            request.on_worker = False
