"""Who may wait, and for how long: a bounded queue, a limit on the time in it, and a deadline a request.

`max_num_queued_requests` refuses a request when that many wait already, and `queue_timeout` ends one that found no
place in so many seconds; both say that the server is overloaded, and the same request may be served later. The
request option `timeout` is the client's: so many seconds after its arrival a request ends with reason `timeout`,
waiting or running, and keeps what it generated.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from headrace.core.config import Section, option
from headrace.core.errors import OverloadedError
from headrace.core.interfaces import Constraint
from headrace.core.interfaces.build import CoreContext
from headrace.core.metrics import Metric, series_name
from headrace.core.plan import StepPlan
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar
from headrace.core.request import Request

__all__ = ["Admission", "AdmissionSection", "Timeout", "headrace_api", "headrace_register", "name"]

name = "admission"
headrace_api = ">=1,<2"

Timeout = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
"""Seconds."""


class AdmissionSection(Section):
    """How many requests may wait, and how long."""

    max_num_queued_requests: int | None = option(
        None, "Most requests that wait for a place; more are refused. Default: no limit.", ge=1
    )
    queue_timeout: float | None = option(
        None, "Seconds a request waits for a place before it is refused. Default: no limit.", gt=0
    )


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the section, the request option, the constraint and what it counts."""
    registrar.config_section(name, AdmissionSection)
    registrar.request_option("timeout", Timeout)
    registrar.constraint(name, Admission)
    registrar.metric(
        "admission_rejections", lambda: Metric("counter", "Requests refused for lack of room, by reason.")
    )


class _Deadline(NamedTuple):
    """When something is due, in seconds of the monotonic clock; sorts by that."""

    when: float
    number: int
    """Of the request: a name may be used again, a number is not."""
    request_id: str
    in_queue: bool
    """True: it holds while the request waits for its first place. False: until the request ends."""


class Admission(Constraint):
    """Refuses, and ends what is due. It limits no tokens.

    Waiting are requests that never had a place, parked ones included. Those that came since the engine last planned a
    step could not get one yet: as long as places are free for them and nobody else waits, they do not fill the queue.

    clock: the monotonic clock, in seconds. wall_clock: that of `EngineRequest.arrival_time`.
    """

    name = name

    def __init__(
        self,
        context: CoreContext,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        section = context.config.section(name, AdmissionSection)
        self._limit = section.max_num_queued_requests
        self._queue_timeout = section.queue_timeout
        self._places = context.config.scheduler.max_num_seqs
        self._finish = context.finish
        self._clock, self._wall_clock = clock, wall_clock
        self._numbers = itertools.count()
        self._open: dict[str, int] = {}
        """Unfinished requests, and their numbers."""
        self._waiting: set[str] = set()
        self._new: set[str] = set()
        """Those of them that came since the last step was planned."""
        self._deadlines: list[_Deadline] = []
        """A heap. Requests that ended leave theirs in it, until it is swept."""
        self._refused = Counter({"queue_full": 0, "queue_timeout": 0})

    def on_add(self, request: Request) -> None:
        """Take the request in. Raises `OverloadedError` where the queue is full."""
        self._check_room()
        request_id, number = request.request_id, next(self._numbers)
        self._open[request_id] = number
        self._waiting.add(request_id)
        self._new.add(request_id)
        now = self._clock()
        if self._queue_timeout is not None:
            self._set(_Deadline(now + self._queue_timeout, number, request_id, True))
        timeout = request.params.options.get("timeout")
        if timeout is not None:
            passed = self._wall_clock() - request.arrival_time if request.arrival_time else 0.0
            self._set(_Deadline(now + timeout - passed, number, request_id, False))

    def _check_room(self) -> None:
        if self._limit is None:
            return
        num_waiting = len(self._waiting)
        room = self._limit
        if num_waiting == len(self._new):
            room += max(0, self._places - (len(self._open) - num_waiting))
        if num_waiting < room:
            return
        self._refused["queue_full"] += 1
        raise OverloadedError(
            f"{num_waiting} requests wait already, and max_num_queued_requests is {self._limit}; try again later, or "
            "start with a larger max_num_queued_requests"
        )

    def begin(self, plan: StepPlan) -> None:
        """End what is due. Called at least every 50 ms while there is any request."""
        self._new.clear()
        if not self._deadlines or self._deadlines[0].when > (now := self._clock()):
            return
        while self._deadlines and self._deadlines[0].when <= now:
            due = heapq.heappop(self._deadlines)
            if self._holds(due):
                self._end(due)

    def _end(self, due: _Deadline) -> None:
        if not due.in_queue:
            self._finish([due.request_id], "timeout", None)
            return
        self._refused["queue_timeout"] += 1
        error = OverloadedError(
            f"the request found no place within the {self._queue_timeout:g} seconds of queue_timeout; try again "
            "later, or start with a larger queue_timeout"
        )
        self._finish([due.request_id], "error", error)

    def commit(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """The request has a place, and had one from now on."""
        self._waiting.discard(request.request_id)

    def on_finish(self, request: Request) -> None:
        """Forget the request."""
        self._open.pop(request.request_id, None)
        self._waiting.discard(request.request_id)
        self._new.discard(request.request_id)

    def metrics(self) -> Mapping[str, float]:
        """Refusals by reason."""
        return {series_name("admission_rejections", reason=why): n for why, n in self._refused.items()}

    def _holds(self, due: _Deadline) -> bool:
        if self._open.get(due.request_id) != due.number:
            return False
        return not due.in_queue or due.request_id in self._waiting

    def _set(self, deadline: _Deadline) -> None:
        heapq.heappush(self._deadlines, deadline)
        if len(self._deadlines) > 64 + 4 * len(
            self._open
        ):  # mostly of requests that ended: sweep, once in a while
            self._deadlines = [due for due in self._deadlines if self._holds(due)]
            heapq.heapify(self._deadlines)
