"""The outermost layer of the HTTP server: who is let in, and how many are inside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

__all__ = ["FREE_PATHS", "Gate"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FREE_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics", "/version"})
"""What probes and dashboards ask: answered while draining, and not counted as load."""


class Gate:
    """An ASGI application around another one.

    Counts requests by path and status for /metrics, and the open ones for /load and for draining. Once closed, it
    answers 503 to whatever asks for work.
    """

    def __init__(self, app: App, route_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._route_of = route_of
        self._refusal: bytes | None = None
        self.num_open = 0
        """Requests that are being answered, probes aside."""
        self.answered: Counter[tuple[str, str, int]] = Counter()
        """Method, route and status → how many since `take_answered`."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing new is begun."""
        return self._refusal is not None

    def close(self, why: str) -> None:
        """Begin nothing new from now on."""
        error = {"message": why, "type": "service_unavailable_error", "param": None, "code": 503}
        self._refusal = msgspec.json.encode({"error": error})

    def take_answered(self) -> dict[str, float]:
        """Return what was answered since the last call, as series of a counter."""
        taken, self.answered = self.answered, Counter()
        return {
            f'http_requests{{method="{method}",handler="{route}",status="{status}"}}': count
            for (method, route, status), count in taken.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in FREE_PATHS:
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500

        async def noting_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.num_open += 1
        scope["headrace.begun"] = begun
        try:
            if self._refusal is not None:
                await _refuse(noting_send, self._refusal)
            else:
                await self._app(scope, receive, noting_send)
        finally:
            self.num_open -= 1
            self.answered[scope["method"], self._route_of(scope), status] += 1


async def _refuse(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
