"""Counts what requests and steps came to: the counters behind `LLM.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.plan import StepPlan, StepResult
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar
from headrace.core.request import Request

__all__ = ["EngineMetrics", "headrace_api", "headrace_register", "name"]

name = "engine_metrics"
headrace_api = ">=1,<2"


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the listener."""
    registrar.engine_listener("engine_metrics", EngineMetrics)


class EngineMetrics(EngineListener):
    """Counters since the engine started.

    `prompt_tokens` and `generation_tokens` count finished requests; a request with n answers counts n times, as the
    engine runs n.
    """

    name = "engine_metrics"

    def __init__(self, context: CoreContext) -> None:
        self._steps = 0
        self._step_tokens = 0
        self._step_requests = 0
        self._max_step_requests = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the step."""
        self._steps += 1
        self._step_tokens += plan.num_tokens
        self._step_requests += plan.num_requests
        self._max_step_requests = max(self._max_step_requests, plan.num_requests)

    def on_finish(self, request: Request) -> None:
        """Count the request."""
        self._prompt_tokens += request.num_prompt_tokens
        self._generation_tokens += request.num_output_tokens
        self._finished[request.finish_reason or "unknown"] += 1

    def metrics(self) -> Mapping[str, float]:
        """Counters by Prometheus name."""
        return {
            "num_steps": self._steps,
            "iteration_tokens_total": self._step_tokens,
            "iteration_requests_total": self._step_requests,
            "iteration_requests_max": self._max_step_requests,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            **{f'request_success{{finished_reason="{why}"}}': n for why, n in self._finished.items()},
        }
