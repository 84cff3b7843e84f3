"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`, of bounded size."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from headrace.core.errors import EngineError, HeadraceError, OverloadedError, RequestError
from headrace.outputs import CompletionDelta

__all__ = ["ApiError", "ErrorAnswer", "ErrorBody", "api_error", "failure_of", "short", "validation_error"]

MAX_MESSAGE = 2000
"""Characters; texts made from what a client sent may be as long as that was."""
MAX_PARAM = 200
MAX_VALUE = 100

TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""`type` by status; `invalid_request_error` for every other."""

PARAMS = {"prompt_token_ids": "prompt", "beam_width": "n"}
"""What the engine calls a field → what it is called in a request."""


class ErrorBody(msgspec.Struct):
    """What is wrong with a request, or with the server."""

    message: str
    type: str
    param: str | None = None
    """The field, where it is one."""
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """Every answer with a status from 400 on, and an event of a stream that breaks off."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with a status and an error in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        kind = TYPES.get(status, "invalid_request_error")
        name = None if param is None else _bounded(PARAMS.get(param, param), MAX_PARAM)
        self.answer = ErrorAnswer(ErrorBody(_bounded(message, MAX_MESSAGE), kind, name, code))

    def to_json(self) -> bytes:
        """Return the body."""
        return msgspec.json.encode(self.answer)


def api_error(error: HeadraceError) -> ApiError:
    """Return what a client is told of an error that was raised."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), headers={"Retry-After": "1"})
    if isinstance(error, EngineError):
        return ApiError(503, str(error), headers={"Retry-After": "1"})
    return ApiError(500, str(error))


def failure_of(delta: CompletionDelta) -> ApiError | None:
    """Return what a client is told of an answer that failed; None: it did not."""
    if delta.finish_reason == "abort":
        return ApiError(503, "the server ended the request before its answer was complete")
    if delta.finish_reason != "error":
        return None
    text = delta.error or "the engine gave no reason"
    if delta.error_kind == RequestError.kind:
        return ApiError(400, text)
    if delta.error_kind == OverloadedError.kind:
        return ApiError(503, text, headers={"Retry-After": "1"})
    return ApiError(500, text)


def validation_error(error: ValidationError) -> ApiError:
    """Return pydantic's report as one line: which field, what is wrong with it, what was given."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    text = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] == "missing" else f", got {short(first['input'])}"
    return ApiError(400, f"{param + ': ' if param else ''}{text}{got}", param=param)


def short(value: Any) -> str:
    """Return a value as Python writes it, cut to 100 characters without ever writing out more."""
    writer = reprlib.Repr()
    writer.maxstring = writer.maxlong = writer.maxother = MAX_VALUE
    return writer.repr(value)[:MAX_VALUE]


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
