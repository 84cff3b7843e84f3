"""Counts what requests and steps came to, under vLLM's names: what `LLM.metrics` and `/metrics` tell.

All counting is done in the core half, so there is one truth, however many front ends there are. The front half only
notes on a request with several answers how many they are, as the core runs each of them as a request of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.plugins.engine_metrics.described import DESCRIBED
from headrace.plugins.engine_metrics.listener import NUM_ANSWERS, EngineMetrics

if TYPE_CHECKING:
    from headrace.core.interfaces import ProcessedInput
    from headrace.core.interfaces.build import FrontContext
    from headrace.core.plugin.registry import Registrar

__all__ = ["AnswerCount", "headrace_api", "headrace_register", "name"]

name = "engine_metrics"
headrace_api = ">=1,<2"


class AnswerCount:
    """Input processor: notes `n` where it is not 1."""

    name = "engine_metrics"

    def __init__(self, context: FrontContext) -> None:
        pass

    def process(self, item: ProcessedInput) -> None:
        """Fill the stash."""
        if item.params.n > 1:
            item.stash[NUM_ANSWERS] = item.params.n


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register both halves, what travels between them, and what each name means."""
    registrar.stash_key(NUM_ANSWERS)
    registrar.input_processor(name, AnswerCount)
    registrar.engine_listener(name, EngineMetrics)
    for metric in DESCRIBED:
        registrar.metric(metric, partial(DESCRIBED.__getitem__, metric))
