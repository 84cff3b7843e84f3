"""Reasoning parsers: how models mark thinking. `think`, `qwen3` and `deepseek_r1`; option `reasoning_parser`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import ParserContext, ReasoningParser
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "reasoning"
headrace_api = ">=1,<2"


def _think(context: ParserContext) -> ReasoningParser:
    from headrace.plugins.reasoning.think import ThinkParser

    return ThinkParser(context)


def _deepseek_r1(context: ParserContext) -> ReasoningParser:
    from headrace.plugins.reasoning.think import ThinkParser

    return ThinkParser(context, always=True)


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the parsers. `qwen3` is `think` by the name that vLLM's users know."""
    registrar.reasoning_parser("think", _think)
    registrar.reasoning_parser("qwen3", _think)
    registrar.reasoning_parser("deepseek_r1", _deepseek_r1)
