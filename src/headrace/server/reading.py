"""Reads one answer of a chat: thinking, content and tool calls, as its text and its tokens come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.core.errors import HeadraceError, PluginCallError
from headrace.core.interfaces import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    ReasoningParser,
    ToolParser,
)

__all__ = ["AnswerReader", "Part", "Plugged", "isolated"]

Part = Content | Reasoning | CallStart | CallArguments

P = TypeVar("P")


@dataclass(frozen=True)
class Plugged(Generic[P]):
    """A parser, and the plugin it is of."""

    parser: P
    plugin: str


@contextmanager
def isolated(plugin: str) -> Iterator[None]:
    """Around a call of a plugin's parser. Raises `PluginCallError` where that raises something of its own."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # isolation point: a plugin's call for one request
        raise PluginCallError(
            f"plugin {plugin!r} failed to read the answer: {type(error).__name__}: {error}", plugin=plugin
        ) from error


class AnswerReader:
    """Without parsers, an answer is content.

    Parameters
    ----------
    reasoning: takes the thinking out first.
    tools: finds the calls in what is left.
    keeps_all_calls: False: the first alone is told.
    tells_reasoning: False: thinking is dropped.

    Raises `PluginCallError` for a parser that raises something of its own.
    """

    def __init__(
        self,
        reasoning: Plugged[ReasoningParser] | None = None,
        tools: Plugged[ToolParser] | None = None,
        *,
        keeps_all_calls: bool = True,
        tells_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keeps_all_calls = keeps_all_calls
        self._tells_reasoning = tells_reasoning
        self._thought = _ThoughtTokens(() if reasoning is None else reasoning.parser.end_ids)
        self.num_calls = 0
        """Calls told so far."""
        self._is_dropping = False
        """The call that comes is not to be told."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the answer up to the end of its thinking; 0 where it did not think."""
        return self._thought.count

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """Take more of the answer; return what is certain now."""
        parts: Sequence[Reasoning | Content] = [Content(text)] if text else []
        if self._reasoning is not None:
            with isolated(self._reasoning.plugin):
                parts = self._reasoning.parser.push(text)
        self._thought.take(token_ids, parts)
        return list(self._told(parts))

    def finish(self) -> list[Part]:
        """Return the rest: the answer has ended."""
        told: list[Part] = []
        if self._reasoning is not None:
            with isolated(self._reasoning.plugin):
                parts = self._reasoning.parser.finish()
            self._thought.take((), parts)
            told += self._told(parts)
        if self._tools is not None:
            with isolated(self._tools.plugin):
                rest = self._tools.parser.finish()
            told += self._counted(rest)
        return told

    def _told(self, parts: Sequence[Reasoning | Content]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Content) and self._tools is not None:
                with isolated(self._tools.plugin):
                    found = self._tools.parser.push(part.text)
                yield from self._counted(found)
            elif isinstance(part, Content) or self._tells_reasoning:
                yield part

    def _counted(self, parts: Sequence[Content | CallStart | CallArguments]) -> Iterator[Part]:
        """Yield what is told, without calls that are not to be kept."""
        for part in parts:
            if isinstance(part, CallStart):
                self._is_dropping = bool(self.num_calls) and not self._keeps_all_calls
                self.num_calls += not self._is_dropping
            if isinstance(part, Content) or not self._is_dropping:
                yield part


class _ThoughtTokens:
    """Counts the tokens of an answer's thinking, up to the ids that end it; without them, to where content begins."""

    def __init__(self, end_ids: tuple[int, ...]) -> None:
        self._end_ids = end_ids
        self._latest: tuple[int, ...] = ()
        self._num_tokens = 0
        self._is_over = False
        self._has_thought = False

    @property
    def count(self) -> int:
        """As far as it has come."""
        return self._num_tokens if self._has_thought else 0

    def take(self, token_ids: Sequence[int], parts: Sequence[Reasoning | Content]) -> None:
        """Take tokens and what their text was."""
        for token_id in token_ids:
            if self._is_over:
                break
            self._num_tokens += 1
            if self._end_ids:
                self._latest = (*self._latest, token_id)[-len(self._end_ids) :]
                self._is_over = self._latest == self._end_ids
        self._has_thought |= any(isinstance(part, Reasoning) for part in parts)
        self._is_over |= any(isinstance(part, Content) for part in parts)
