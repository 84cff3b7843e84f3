"""Tool parsers: how models write tool calls. `hermes`, `llama3_json` and `pythonic`, chosen by `tool_call_parser`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import ParserContext, ToolParser
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "tools"
headrace_api = ">=1,<2"


def _hermes(context: ParserContext) -> ToolParser:
    from headrace.plugins.tools.objects import HERMES, ObjectFormat
    from headrace.plugins.tools.scanner import CallScanner

    return CallScanner(ObjectFormat(HERMES, context.tools))


def _llama3_json(context: ParserContext) -> ToolParser:
    from headrace.plugins.tools.objects import LLAMA3_JSON, ObjectFormat
    from headrace.plugins.tools.scanner import CallScanner

    return CallScanner(ObjectFormat(LLAMA3_JSON, context.tools))


def _pythonic(context: ParserContext) -> ToolParser:
    from headrace.plugins.tools.pythonic import PythonicFormat
    from headrace.plugins.tools.scanner import CallScanner

    return CallScanner(PythonicFormat(context.tools))


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the parsers."""
    registrar.tool_parser("hermes", _hermes)
    registrar.tool_parser("llama3_json", _llama3_json)
    registrar.tool_parser("pythonic", _pythonic)
