"""`GET /v1/models`, `GET /v1/models/{name}` and `GET /version`."""

from __future__ import annotations

import time

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

import headrace
from headrace.async_llm import AsyncLLM
from headrace.server.answers import Model, ModelList, Version
from headrace.server.compute import ComputeRoutes
from headrace.server.openapi import answers

__all__ = ["add_model_routes", "json_response"]


def json_response(answer: msgspec.Struct) -> Response:
    """Return an answer with status 200."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def add_model_routes(app: FastAPI, engine: AsyncLLM, compute: ComputeRoutes) -> None:
    """Add the routes that tell which model there is."""
    created = int(time.time())

    def model(name: str) -> Model:
        variant = compute.variant(name)
        return Model(
            id=name,
            created=created,
            root=engine.config.model if variant is None else variant.root,
            parent=None if variant is None else compute.names[0],
            max_model_len=engine.front.max_model_len,
        )

    @app.get("/v1/models", tags=["models"], responses=answers(ModelList, 401, 503))
    async def models() -> Response:
        """The names that the model answers to."""
        compute.check_there()
        names = [*compute.names, *(variant.name for variant in compute.variants())]
        return json_response(ModelList([model(name) for name in names]))

    @app.get("/v1/models/{name:path}", tags=["models"], responses=answers(Model, 401, 404, 503))
    async def one(name: str) -> Response:
        """What is known of the model by one of its names."""
        compute.check_there()
        return json_response(model(compute.check_model(name)))

    @app.get("/version", tags=["status"], responses=answers(Version))
    async def version() -> Response:
        """The version of Headrace."""
        return json_response(Version(headrace.__version__))
