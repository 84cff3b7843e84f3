"""The web application: routes, and what surrounds them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import headrace
from headrace.async_llm import AsyncLLM
from headrace.core.errors import PluginLoadError
from headrace.core.interfaces.build import HttpContext
from headrace.server.answers import Chat, Completion
from headrace.server.compute import CHAT, COMPLETIONS, ComputeRoutes
from headrace.server.exchange import Exchange
from headrace.server.handlers import add_error_handlers
from headrace.server.middleware import ApiKeys, RequestIds, RootPath
from headrace.server.model_routes import add_model_routes
from headrace.server.openapi import Application, answers, asks_for
from headrace.server.options import ServerSection
from headrace.server.protocol import ChatBody, CompletionBody
from headrace.server.token_routes import add_token_routes

__all__ = ["build_app"]

ROUTES: tuple[tuple[str, str, type[BaseModel], type[msgspec.Struct]], ...] = (
    (COMPLETIONS, "Continue prompts.", CompletionBody, Completion),
    (CHAT, "Answer a conversation.", ChatBody, Chat),
)


def build_app(engine: AsyncLLM, options: ServerSection) -> FastAPI:
    """Return the application that answers for an engine, which may be still starting: it answers 503 until then.

    `app.state.compute` answers without HTTP around it. Raises `PluginLoadError` for a plugin whose route cannot be
    added.
    """
    compute = ComputeRoutes(engine, options)
    app = Application(
        engine.registry,
        title="Headrace",
        version=headrace.__version__,
        redirect_slashes=False,
    )
    app.state.compute = compute
    add_error_handlers(app)
    for url, summary, body, answer in ROUTES:
        app.add_api_route(
            url,
            _endpoint(compute, url, options),
            methods=["POST"],
            tags=["compute"],
            summary=summary,
            operation_id=body.__name__.removesuffix("Body").lower(),
            openapi_extra=asks_for(body),
            responses=answers(answer, 400, 401, 404, 413, 500, 503, streams=True),
            response_model=None,
        )
    add_model_routes(app, engine, compute)
    add_token_routes(app, engine, compute, options)
    _add_plugin_routes(app, engine)
    _surround(app, options)
    return app


def _endpoint(compute: ComputeRoutes, url: str, options: ServerSection) -> Any:
    async def answer(request: Request) -> Response:
        return Exchange(compute, url, options)

    return answer


def _add_plugin_routes(app: FastAPI, engine: AsyncLLM) -> None:
    context = HttpContext(app, engine, engine.config, engine.registry)
    for entry in engine.registry.entries("http_route"):
        try:
            entry.factory(context)
        except Exception as error:  # isolation point: a plugin's call
            raise PluginLoadError(
                f"plugin {entry.plugin!r} could not add its HTTP route {entry.name!r}: {type(error).__name__}: "
                f"{error}; plugins.disable leaves the plugin out",
                plugin=entry.plugin,
            ) from error


def _surround(app: FastAPI, options: ServerSection) -> None:
    """Add what every request passes; the last one added is the outermost."""
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
    if options.root_path:
        app.add_middleware(RootPath, root_path=options.root_path)
