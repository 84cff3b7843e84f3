"""Adds up what the HTTP processes of a server answered, so that each of them can tell the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.metrics import Metric
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["HttpMetrics", "headrace_api", "headrace_register", "name"]

name = "http_metrics"
headrace_api = ">=1,<2"


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the listener and what it counts."""
    registrar.engine_listener("http_metrics", HttpMetrics)
    registrar.metric(
        "http_requests", lambda: Metric("counter", "Requests answered, by method, route and status.")
    )


class HttpMetrics(EngineListener):
    """Sums of counters that front ends send."""

    name = "http_metrics"

    def __init__(self, context: CoreContext) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, counts: Mapping[str, float]) -> None:
        """Take what a front end counted since it last told; called by front ends."""
        self._sums.update(counts)

    def metrics(self) -> Mapping[str, float]:
        """The sums by series."""
        return dict(self._sums)
