"""The contracts of parsers: the text of an answer becomes thinking, content and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace.core.interfaces.text import Tokenizer

__all__ = [
    "CallArguments",
    "CallStart",
    "Content",
    "ParserContext",
    "Reasoning",
    "ReasoningParser",
    "ToolParser",
]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; it cannot be taken back."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last; joined they are the text of a JSON object."""

    text: str


@dataclass(frozen=True)
class ParserContext:
    """What is known of an answer before it begins."""

    tokenizer: Tokenizer
    prompt: str
    """The rendered conversation, up to where the answer begins."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schemas of the arguments, by name of the tool; what else is called is no call."""


@runtime_checkable
class ToolParser(Protocol):
    """Finds the calls in one answer. The server makes one an answer and uses it on one thread.

    Events depend on the text alone and never on how it was cut. No text is lost: what is neither a call nor markup
    around one is content, a call that breaks off or is malformed included, so a call is best told when it is known
    to be whole. Raising fails the request.
    """

    def push(self, text: str) -> Sequence[Content | CallStart | CallArguments]:
        """Take more of the answer; return what is certain now."""
        ...

    def finish(self) -> Sequence[Content | CallStart | CallArguments]:
        """Return the rest: the answer has ended. Called once."""
        ...


@runtime_checkable
class ReasoningParser(Protocol):
    """Separates thinking from one answer's content; otherwise as `ToolParser`, which gets the content."""

    end_ids: tuple[int, ...]
    """Token ids in a row that end the thinking: a grammar holds behind them. Empty: this answer does not think."""
    start_id: int | None
    """With `end_ids`: an answer that begins otherwise does not think; a grammar holds at once. None: it thinks."""

    def push(self, text: str) -> Sequence[Reasoning | Content]:
        """Take more of the answer; return what is certain now."""
        ...

    def finish(self) -> Sequence[Reasoning | Content]:
        """Return the rest: the answer has ended. Called once."""
        ...
