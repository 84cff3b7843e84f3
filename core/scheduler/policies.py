"""The built-in policies: first come, first served; and by priority."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.core.request import Request, RequestState

__all__ = ["FCFSPolicy", "PriorityPolicy"]


class FCFSPolicy:
    """By arrival. Who was preempted goes before who never ran; the last admitted gives way."""

    dynamic = False

    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        """Sort key in the queue."""
        return (not request.was_preempted, request.arrival_time, request.request_id)

    def victim(self, running: Sequence[Request], wanting: Request) -> Request | None:
        """The last admitted; a waiting request takes nobody's place."""
        return running[-1] if wanting.state is RequestState.RUNNING else None


class PriorityPolicy:
    """By `priority`, smaller first; among equals as fcfs. The worst gives way, also to a better newcomer."""

    dynamic = False

    def order(self, request: Request, now: float) -> tuple[Any, ...]:
        """Sort key in the queue."""
        return (request.priority, not request.was_preempted, request.arrival_time, request.request_id)

    def victim(self, running: Sequence[Request], wanting: Request) -> Request | None:
        """The worst by priority, then the last admitted."""
        worst = max(running, key=lambda request: (request.priority, request.admission))
        if wanting.state is RequestState.RUNNING or worst.priority > wanting.priority:
            return worst
        return None
