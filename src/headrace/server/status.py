"""Routes for probes, dashboards and developers: what the server is, not what a model says."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from headrace.async_llm import AsyncLLM
from headrace.metrics_text import exposition
from headrace.server.gate import Gate
from headrace.server.options import ServerSection, model_names

__all__ = ["add_status_routes"]

HTTP_METRICS = "http_metrics"
"""The plugin that adds up what API processes answered."""


def add_status_routes(app: FastAPI, llm: AsyncLLM, options: ServerSection, gate: Gate) -> None:
    """Add `/health`, `/ready`, `/ping`, `/load`, `/metrics`, and in developer mode `/reset_prefix_cache`."""

    @app.get("/health", tags=["status"])
    async def health() -> JSONResponse:
        """Whether the engine is alive: 200, or 503 with the cause."""
        lost = llm.lost
        alive = lost is None
        body: dict[str, Any] = {
            "status": "ok" if alive else "unhealthy",
            "engines": [{"pid": llm.engine_pid, "alive": alive}],
        }
        if lost is not None:
            body["cause"] = str(lost)
        return JSONResponse(body, 200 if alive else 503)

    @app.get("/ready", tags=["status"])
    async def ready() -> JSONResponse:
        """Whether new requests are taken: the engine is there, and the server is not shutting down."""
        lost = llm.lost
        why = "the server is shutting down" if gate.is_closed else None if lost is None else str(lost)
        body = {"status": "ready"} if why is None else {"status": "not ready", "cause": why}
        return JSONResponse(body, 200 if why is None else 503)

    @app.get("/ping", tags=["status"])
    async def ping() -> Response:
        """Whether this process answers."""
        return Response()

    @app.get("/load", tags=["status"])
    async def load() -> JSONResponse:
        """Requests that this process is answering now."""
        return JSONResponse({"server_load": gate.num_open})

    @app.get("/metrics", tags=["status"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms of the whole server, for Prometheus."""
        registry = llm.front.registry
        if HTTP_METRICS in {entry.plugin for entry in registry.entries("engine_listener")}:
            await llm.call(HTTP_METRICS, "add", gate.take_answered())
        series = await llm.metrics()
        body, content_type = exposition(
            series,
            {entry.name: entry.factory() for entry in registry.entries("metric")},
            prefix=options.metrics_prefix,
            labels={"model_name": model_names(llm.config)[0], "engine": "0"},
            openmetrics="application/openmetrics-text" in request.headers.get("accept", ""),
        )
        return Response(body, media_type=content_type)

    if options.dev_mode:

        @app.post("/reset_prefix_cache", tags=["development"])
        async def reset_prefix_cache() -> JSONResponse:
            """Forget every cached block; `done` is false, and nothing changed, while requests hold blocks."""
            return JSONResponse({"done": await llm.reset_prefix_cache()})
