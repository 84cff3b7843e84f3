"""Thinking between `<think>` and `</think>` at the beginning of an answer; the prompt may have opened it already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.core.interfaces import Content, ParserContext, Reasoning

__all__ = ["ThinkParser"]

OPEN = "<think>"
CLOSE = "</think>"

Event = Reasoning | Content


class ThinkParser:
    """Implements `ReasoningParser`. Line breaks beside the tags belong to them.

    always: an answer thinks even where neither prompt nor answer shows the opening tag, unless the prompt closes the
        thinking itself.
    """

    def __init__(self, context: ParserContext, *, always: bool = False) -> None:
        prompt = context.prompt.rstrip()
        is_closed = prompt.endswith(CLOSE)
        is_open = not is_closed and (always or prompt.endswith(OPEN))
        start = _ids(context, OPEN)
        # A model in whose vocabulary the tag is no token was not taught to think by itself.
        may_open = not is_closed and not is_open and len(start) == 1
        self.end_ids = _ids(context, CLOSE) if is_open or may_open else ()
        self.start_id = start[0] if may_open else None
        self._otherwise: Literal["thinking", "content"] = "thinking" if is_open else "content"
        self._state: Literal["start", "thinking", "content"] = "content" if is_closed else "start"
        self._text = ""
        self._skips_breaks = False
        """Line breaks that come now stand behind a tag."""

    def push(self, text: str) -> Sequence[Event]:
        """See `ReasoningParser`."""
        self._text += text
        return self._advance(over=False)

    def finish(self) -> Sequence[Event]:
        """See `ReasoningParser`."""
        return self._advance(over=True)

    def _advance(self, *, over: bool) -> list[Event]:
        events: list[Event] = []
        if self._state == "start":
            self._start(over)
        if self._state == "thinking":
            self._think(over, events)
        if self._state == "content":
            text = self._take(len(self._text))
            if text:
                events.append(Content(text))
        return events

    def _start(self, over: bool) -> None:
        """Look for the opening tag, which nothing but white space may stand before."""
        text = self._text.lstrip()
        if text.startswith(OPEN):
            self._text, self._state, self._skips_breaks = text[len(OPEN) :], "thinking", True
        elif over or not OPEN.startswith(text):
            self._state = self._otherwise
            self._skips_breaks = self._state == "thinking"

    def _think(self, over: bool, events: list[Event]) -> None:
        end = self._text.find(CLOSE)
        if end < 0:
            text = self._take(len(self._text) if over else _certain(self._text))
            if text:
                events.append(Reasoning(text))
            return
        text = self._take(end).rstrip("\n")
        if text:
            events.append(Reasoning(text))
        self._text = self._text[len(CLOSE) :]
        self._state, self._skips_breaks = "content", True

    def _take(self, length: int) -> str:
        """Take text off the front, without line breaks that stand behind a tag."""
        text, self._text = self._text[:length], self._text[length:]
        if self._skips_breaks:
            text = text.lstrip("\n")
            self._skips_breaks = not text
        return text


def _ids(context: ParserContext, text: str) -> tuple[int, ...]:
    return tuple(context.tokenizer.encode(text, add_special_tokens=False, parse_special=True))


def _certain(text: str) -> int:
    """Return how much of a text is neither line breaks before the closing tag nor the tag's beginning."""
    sizes = range(min(len(CLOSE) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if text.endswith(CLOSE[:size])), 0)
    return len(text[: len(text) - begun].rstrip("\n"))
