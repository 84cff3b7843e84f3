"""What a server says of itself at /openapi.json: bodies and answers as they are checked and made."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from headrace.core.plugin.registry import Registry
from headrace.core.sampling_params import SamplingParams
from headrace.server.answers import Chat, Completion, Model, ModelList, Text, Tokens, Version
from headrace.server.errors import ErrorAnswer
from headrace.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

__all__ = ["Application", "answers", "asks_for"]

REFERENCE = "#/components/schemas/{}"
ANSWERS = (Completion, Chat, Model, ModelList, Tokens, Text, Version, ErrorAnswer)
ERRORS = {
    400: "The request is wrong, or asks for something that is not available.",
    401: "A key is missing, where the server asks for one.",
    404: "There is no such model.",
    413: "The body is too large.",
    500: "The server failed.",
    503: "There is no engine, or no place for the request now; Retry-After says when to ask again.",
}


class Application(FastAPI):
    """A FastAPI application whose description holds what its routes read and answer by themselves."""

    def __init__(self, registry: Registry, **settings: Any) -> None:
        super().__init__(**settings)
        self._registry = registry

    def openapi(self) -> dict[str, Any]:
        """Return the description; made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for body in (CompletionBody, ChatBody):
                _add(schemas, body, _sampling(self._registry))
            for other in (TokenizeBody, DetokenizeBody):
                _add(schemas, other, {})
            _, answers = msgspec.json.schema_components(ANSWERS, ref_template=REFERENCE.format("{name}"))
            schemas.update(answers)
        return self.openapi_schema or {}


def asks_for(body: type[BaseModel]) -> dict[str, Any]:
    """Return what a route adds to its description: the body it reads."""
    reference = {"$ref": REFERENCE.format(body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def answers(answer: type[msgspec.Struct], *errors: int, streams: bool = False) -> dict[int | str, Any]:
    """Return the answers of a route for its description: the good one, and errors by status."""
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REFERENCE.format(answer.__name__)}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    wrong = {"application/json": {"schema": {"$ref": REFERENCE.format(ErrorAnswer.__name__)}}}
    told: dict[int | str, Any] = {200: {"description": "The answer.", "content": content}}
    return told | {status: {"description": ERRORS[status], "content": wrong} for status in errors}


def _sampling(registry: Registry) -> dict[str, Any]:
    """Return the properties that both compute routes hand to the sampler, those of plugins included."""
    properties = dict(SamplingParams.model_json_schema()["properties"])
    properties["stop"] = {"anyOf": [{"type": "string", "minLength": 1}, properties["stop"]]}
    for entry in registry.entries("request_option"):
        properties[entry.name] = TypeAdapter(entry.factory).json_schema(
            ref_template=REFERENCE.format("{model}")
        )
    return properties


def _add(schemas: dict[str, Any], body: type[BaseModel], more: dict[str, Any]) -> None:
    """Add a body's schema; a null stands for a field's default."""
    schema = body.model_json_schema(ref_template=REFERENCE.format("{model}"))
    properties = more | schema["properties"]
    for name, field in properties.items():
        schemas.update(field.pop("$defs", {}))
        nullable = name in schema.get("required", ()) or {"type": "null"} in field.get("anyOf", ())
        schema["properties"][name] = field if nullable else {"anyOf": [field, {"type": "null"}]}
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
