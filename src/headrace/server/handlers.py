"""Every error an application answers with has OpenAI's shape: those of routes, of the framework, and faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from headrace.core.errors import HeadraceError
from headrace.server.bodies import ClientGone
from headrace.server.errors import ApiError, api_error, short

__all__ = ["add_error_handlers", "error_response"]


def error_response(error: ApiError) -> Response:
    """Return the answer that an error is."""
    return Response(error.to_json(), error.status, error.headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Let an application answer its errors in OpenAI's shape."""

    def told(error: Exception) -> Response:
        if isinstance(error, HeadraceError):
            error = api_error(error)
        assert isinstance(error, ApiError)
        return error_response(error)

    async def known(request: Request, error: Exception) -> Response:
        return told(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = short(request.scope["path"]), short(request.method)
        headers = error.headers
        if error.status_code == 404 and error.detail == "Not Found":
            there = ", ".join(_routes(app.routes))
            return told(
                ApiError(404, f"there is no route {path}; there are: {there}", code="route_not_found")
            )
        if error.status_code == 405:
            allowed = (headers or {}).get("Allow", "")
            return told(
                ApiError(
                    405,
                    f"{path} does not take {method}; it takes {allowed}",
                    code="method_not_allowed",
                    headers=headers,
                )
            )
        return told(ApiError(error.status_code, str(error.detail), headers=headers))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return told(ApiError(400, f"{param or 'the request'}: {first['msg']}", param=param))

    async def fault(request: Request, error: Exception) -> Response:
        return told(ApiError(500, "the server failed to answer; its log says why"))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody is there to read it

    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HeadraceError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, fault)


def _routes(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Yield what may be asked for, as `METHOD path`."""
    for route in routes:
        if getattr(route, "include_in_schema", False):
            methods = sorted(set(getattr(route, "methods", None) or ()) - {"HEAD", "OPTIONS"})
            yield f"{'/'.join(methods)} {getattr(route, 'path', '')}"
