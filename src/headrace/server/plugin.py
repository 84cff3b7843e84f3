"""Registers the server's section of the configuration."""

from __future__ import annotations

from typing import Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar
from headrace.server.options import ServerSection

__all__ = ["headrace_api", "headrace_register", "name"]

name = "server"
headrace_api = ">=1,<2"


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the section."""
    registrar.config_section("server", ServerSection)
