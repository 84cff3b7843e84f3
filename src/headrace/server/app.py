"""The web application: routes, and what surrounds them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headrace.async_llm import AsyncLLM
from headrace.server.compute import CHAT, COMPLETIONS, ComputeRoutes
from headrace.server.exchange import Exchange
from headrace.server.handlers import add_error_handlers
from headrace.server.middleware import ApiKeys, RequestIds
from headrace.server.options import ServerSection

__all__ = ["build_app"]


def build_app(engine: AsyncLLM, options: ServerSection) -> FastAPI:
    """Return the application that answers for an engine, which may be still starting: it answers 503 until then.

    `app.state.service` is what answers without HTTP.
    """
    service = ComputeRoutes(engine, options)
    app = FastAPI(title="Headrace", redirect_slashes=False)
    app.state.service = service
    add_error_handlers(app)
    for url in (COMPLETIONS, CHAT):
        app.add_api_route(url, _compute(service, url, options), methods=["POST"], response_model=None)
    if options.api_key:
        app.add_middleware(ApiKeys, keys=options.api_key)
    app.add_middleware(RequestIds)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Headrace-Ignored", "X-Request-Id"],
        )
    return app


def _compute(service: ComputeRoutes, url: str, options: ServerSection) -> Any:
    async def compute(request: Request) -> Response:
        return Exchange(service, url, options.max_body_bytes)

    return compute
