"""The whole HTTP application: OpenAI's routes, status routes, plugins' routes, behind the gate."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from headrace.async_llm import AsyncLLM
from headrace.server.app import build_app
from headrace.server.gate import Gate
from headrace.server.options import ServerSection
from headrace.server.status import add_status_routes

__all__ = ["build_service"]


def build_service(llm: AsyncLLM, options: ServerSection) -> Gate:
    """Return the application that a server runs."""
    app = build_app(llm, options)
    gate = Gate(app, _route_of)
    add_status_routes(app, llm, options, gate)
    return gate


def _route_of(scope: MutableMapping[str, Any]) -> str:
    """Return the path as it was declared: what a client made up is no name for a series."""
    return str(getattr(scope.get("route"), "path", "other"))
