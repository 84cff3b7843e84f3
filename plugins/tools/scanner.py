"""The machine that all formats share: text is content until a call may have begun, and is held until that is known.

    text that came:   content, handed on  |  held: a candidate for calls
                                          ^ here a call may begin

A call is told when it is whole: one that breaks off or is malformed is content, as its text was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.core.interfaces import CallArguments, CallStart, Content

__all__ = ["Call", "CallFormat", "CallScanner", "Candidate", "Verdict", "call_of"]

Event = Content | CallStart | CallArguments


@dataclass(frozen=True)
class Call:
    """A whole call."""

    name: str
    arguments: str
    """The text of a JSON object."""


@dataclass(frozen=True)
class Verdict:
    """What the beginning of the held text is: calls with the markup around them, or content."""

    length: int
    """Characters it speaks of, at least 1."""
    calls: Sequence[Call] = ()
    """Empty: they are content."""


class Candidate(Protocol):
    """A place where calls may have begun."""

    def read(self, held: str, over: bool) -> Verdict | None:
        """Judge; None: more text is needed. It depends on the text, not on how often it was asked.

        held: all text from that place on; it only grows. over: no more will come, so there must be a verdict.
        """
        ...


class CallFormat(Protocol):
    """How one kind of model writes calls."""

    def find(self, text: str, at_line_start: bool) -> int:
        """Return the first index at which calls begin or may begin, else the length of the text.

        at_line_start: nothing but white space stands before the text on its line, or a call.
        """
        ...

    def candidate(self) -> Candidate:
        """Return a judge of the text from such a place on."""
        ...


class CallScanner:
    """Finds the calls of a format in one answer; implements `ToolParser`.

    White space on its own before, between and behind calls is dropped.
    """

    def __init__(self, form: CallFormat) -> None:
        self._format = form
        self._text = ""
        self._candidate: Candidate | None = None
        self._at_line_start = True
        self._beside_call = True
        """Since the answer or the last call nothing came but `_blank`."""
        self._blank = ""
        self._num_calls = 0

    def push(self, text: str) -> Sequence[Event]:
        """See `ToolParser`."""
        self._text += text
        return self._advance(over=False)

    def finish(self) -> Sequence[Event]:
        """See `ToolParser`."""
        events = self._advance(over=True)
        if self._blank and not self._num_calls:
            events.append(Content(self._blank))
        return events

    def _advance(self, *, over: bool) -> list[Event]:
        events: list[Event] = []
        while self._text:
            if self._candidate is None:
                self._hand_on(self._format.find(self._text, self._at_line_start), events)
                if not self._text:
                    break
                self._candidate = self._format.candidate()
            verdict = self._candidate.read(self._text, over)
            if verdict is None:
                break
            self._candidate = None
            if not verdict.calls:
                self._hand_on(verdict.length, events)
                continue
            for call in verdict.calls:
                events += [CallStart(call.name), CallArguments(call.arguments)]
            self._num_calls += len(verdict.calls)
            self._text = self._text[verdict.length :]
            self._blank, self._beside_call, self._at_line_start = "", True, True
        return events

    def _hand_on(self, length: int, events: list[Event]) -> None:
        """Take content off the text."""
        piece, self._text = self._text[:length], self._text[length:]
        if not piece:
            return
        line = piece.rpartition("\n")[2]
        self._at_line_start = ("\n" in piece or self._at_line_start) and not line.strip()
        if self._beside_call and piece.isspace():
            self._blank += piece
            return
        events.append(Content(self._blank + piece))
        self._blank, self._beside_call = "", False


def call_of(name: Any, arguments: Any, tools: Mapping[str, Any]) -> Call | None:
    """Return a call; None where there is no such tool, or where the arguments are no JSON object."""
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return Call(name, text if _is_unicode(text) else json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        return None


def _is_unicode(text: str) -> bool:
    """Return whether a text can be sent: half a surrogate pair cannot, except as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
