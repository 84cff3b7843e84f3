"""The core's half: a request waits, parked, until its grammar is compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.core.errors import HeadraceError, RequestError
from headrace.core.interfaces import Constraint, Grammar, Wait
from headrace.core.request import Request
from headrace.plugins.structured.cache import GrammarCache, backend_failed
from headrace.plugins.structured.options import STRUCTURED

__all__ = ["GRAMMAR", "GrammarWait"]

GRAMMAR = "grammar"
"""Why a request waits."""


@dataclass(frozen=True)
class _Pending:
    grammar: Future[Grammar]
    since: float
    """Seconds, on the monotonic clock."""


class GrammarWait(Constraint):
    """Parks requests until their grammars are there; a grammar that cannot be compiled fails its request alone.

    The loop never compiles: threads do, and wake it.
    """

    name = "structured"

    def __init__(self, cache: GrammarCache, wake: Callable[[], None]) -> None:
        self._cache = cache
        self._wake = wake
        self._pending: dict[str, _Pending] = {}

    def on_add(self, request: Request) -> None:
        """Begin to compile."""
        wanted = request.stash.get(STRUCTURED)
        if wanted is None:
            return
        grammar = self._cache.get(wanted)
        self._pending[request.request_id] = _Pending(grammar, time.monotonic())
        grammar.add_done_callback(lambda _: self._wake())

    def limit(self, request: Request, start: int, count: int) -> int | Wait:
        """All, or `Wait`. Raises what the backend said, or `RequestError` where it takes too long."""
        pending = self._pending.get(request.request_id)
        if pending is None:
            return count
        if not pending.grammar.done():
            limit = self._cache.compile_timeout
            if time.monotonic() - pending.since > limit:
                raise RequestError(
                    f"structured: the grammar was not compiled within {limit:g} s (grammar_compile_timeout)",
                    param="structured",
                )
            return Wait(GRAMMAR)
        del self._pending[request.request_id]
        error = pending.grammar.exception()
        if isinstance(error, HeadraceError):
            raise error
        if error is not None:
            raise backend_failed(error) from error
        return count

    def on_finish(self, request: Request) -> None:
        """Forget; who else waits for the same grammar goes on waiting."""
        self._pending.pop(request.request_id, None)
