"""The waiting requests, in the policy's order."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator

from headrace.core.errors import PluginCallError
from headrace.core.interfaces.scheduling import SchedulingPolicy
from headrace.core.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """Sorted by `policy.order`; keys are taken when a request is pushed, and anew each step if dynamic."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Put a request in its place. Raises `PluginCallError` where the policy cannot say which."""
        try:
            request.queue_key = self._policy.order(request, time.time())
        except Exception as error:  # isolation point: a plugin's call for one request
            name = type(self._policy).__name__
            raise PluginCallError(
                f"scheduling policy {name} failed in order: {type(error).__name__}: {error}", plugin=name
            ) from error
        bisect.insort(self._requests, request, key=_queue_key)

    def peek(self) -> Request:
        """Return the first; there must be one."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        index = bisect.bisect_left(self._requests, request.queue_key, key=_queue_key)
        while self._requests[index] is not request:
            index += 1
        del self._requests[index]

    def refresh(self) -> None:
        """Sort anew if the policy's order moves with time."""
        if self._policy.dynamic:
            now = time.time()
            for request in self._requests:
                request.queue_key = self._policy.order(request, now)
            self._requests.sort(key=_queue_key)


def _queue_key(request: Request) -> tuple[object, ...]:
    return request.queue_key
