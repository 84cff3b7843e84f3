"""The parsers a server was started with, made for each answer."""

from __future__ import annotations

from headrace.core.interfaces import ParserContext, ReasoningParser, ToolParser
from headrace.core.plugin.registry import Entry, Registry
from headrace.server.calls import CallPlan
from headrace.server.forced_calls import ForcedCalls
from headrace.server.options import ServerSection
from headrace.server.protocol import ChatBody
from headrace.server.reading import AnswerReader, Plugged, isolated

__all__ = ["Parsers"]


class Parsers:
    """Raises `ConfigError` for a name that no plugin registered."""

    def __init__(self, registry: Registry, options: ServerSection) -> None:
        self._tools = _entry(registry, "tool_parser", options.tool_call_parser, "tool_call_parser")
        self._reasoning = _entry(registry, "reasoning_parser", options.reasoning_parser, "reasoning_parser")

    @property
    def finds_calls(self) -> bool:
        """Whether calls can be found in free text."""
        return self._tools is not None

    @property
    def finds_reasoning(self) -> bool:
        """Whether thinking is told from content."""
        return self._reasoning is not None

    def thinking(self, context: ParserContext) -> tuple[tuple[int, ...], int | None]:
        """Return `end_ids` and `start_id` of an answer, see `ReasoningParser`."""
        plugged = self._reasoning_parser(context)
        return ((), None) if plugged is None else (plugged.parser.end_ids, plugged.parser.start_id)

    def reader(self, context: ParserContext, plan: CallPlan, body: ChatBody) -> AnswerReader:
        """Return a reader of one answer. Raises `PluginCallError` for a factory that raises something of its own."""
        return AnswerReader(
            self._reasoning_parser(context),
            self._tool_parser(context, plan),
            keeps_all_calls=plan.is_parallel,
            tells_reasoning=body.include_reasoning,
        )

    def _reasoning_parser(self, context: ParserContext) -> Plugged[ReasoningParser] | None:
        if self._reasoning is None:
            return None
        with isolated(self._reasoning.plugin):
            return Plugged(self._reasoning.factory(context), self._reasoning.plugin)

    def _tool_parser(self, context: ParserContext, plan: CallPlan) -> Plugged[ToolParser] | None:
        if plan.is_forced:
            return Plugged(ForcedCalls(plan.name), "server")
        if plan.mode == "none" or self._tools is None:
            return None
        with isolated(self._tools.plugin):
            return Plugged(self._tools.factory(context), self._tools.plugin)


def _entry(registry: Registry, kind: str, name: str | None, option: str) -> Entry | None:
    return None if name is None else registry.get(kind, name, option=option)
