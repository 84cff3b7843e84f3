"""The listener that makes spans, and where they are sent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.core.interfaces import EngineListener
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request

__all__ = ["RequestSpans", "otlp_provider"]

CLOSE_SECONDS = 2.0
"""How long an engine that ends waits for its last spans to be sent."""


def otlp_provider(url: str) -> TracerProvider:
    """Return a provider that sends spans to a collector in batches, on a thread of its own."""
    service = os.environ.get("OTEL_SERVICE_NAME", "headrace")
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class RequestSpans(EngineListener):
    """Makes a span of each request when it ends, from its arrival on. An answer of several is a request of its own.

    model: what the span says the model is.
    clock: seconds since the epoch, as `EngineRequest.arrival_time`.
    """

    name = "tracing"

    def __init__(
        self, provider: TracerProvider, *, model: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headrace")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._clock = clock
        self._before_first: set[str] = set()
        """Requests that run and have no token yet."""
        self._first_token: dict[str, float] = {}

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Note who got a first token."""
        self._before_first.update(entry.request_id for entry in plan.new)
        for name in list(self._before_first):
            outcome = result.requests.get(name)
            if outcome is not None and outcome.tokens:
                self._before_first.discard(name)
                self._first_token.setdefault(name, self._clock())

    def on_finish(self, request: Request) -> None:
        """Make the span. It is queued; nothing is sent here."""
        name, now = request.request_id, self._clock()
        self._before_first.discard(name)
        first = self._first_token.pop(name, None)
        begun = request.arrival_time or now
        carrier = {"traceparent": str(request.params.options.get("traceparent", ""))}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),  # what is no such header begins a trace of its own
            kind=SpanKind.SERVER,
            attributes=self._attributes(request),
            start_time=int(begun * 1e9),
        )
        for key, value in _latencies(request, begun, first, now).items():
            span.set_attribute(f"gen_ai.latency.{key}", value)
        if request.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=int(now * 1e9))

    def _attributes(self, request: Request) -> Mapping[str, str | int | float | tuple[str, ...]]:
        params = request.params
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_output_tokens,
            "gen_ai.response.finish_reasons": (request.finish_reason or "unknown",),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return attributes

    def close(self) -> None:
        """Send what is left, as far as that is quick."""
        # The library tries a collector that is gone again and again, and knows no limit of time here.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)


def _latencies(request: Request, begun: float, first: float | None, now: float) -> Mapping[str, float]:
    """Return seconds by what passed in them; of a request that never ran, only how long it waited."""
    scheduled = request.scheduled_time
    told = {"e2e": now - begun, "time_in_queue": (scheduled or now) - begun}
    if first is not None:
        told["time_to_first_token"] = first - begun
    if scheduled is not None:
        told["time_in_model_prefill"] = (first or now) - scheduled
        told["time_in_model_decode"] = now - (first or now)
        told["time_in_model_inference"] = now - scheduled
    return {key: max(0.0, value) for key, value in told.items()}
