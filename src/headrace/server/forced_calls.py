"""The parser of answers that a grammar forced to be calls: a JSON list of them, or one tool's arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.core.interfaces import CallArguments, CallStart, Content

__all__ = ["ForcedCalls"]

Event = Content | CallStart | CallArguments


class ForcedCalls:
    """Implements `ToolParser`. An answer that was cut off is content: nobody gets half a call.

    name: the tool whose arguments the answer is; empty: the answer is a list of calls.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> Sequence[Event]:
        """See `ToolParser`."""
        self._text += text
        return ()

    def finish(self) -> Sequence[Event]:
        """See `ToolParser`."""
        try:
            return self._calls(json.loads(self._text))
        except (ValueError, RecursionError):
            return [Content(self._text)] if self._text else ()

    def _calls(self, value: Any) -> list[Event]:
        calls = (
            [(self._name, value)] if self._name else [(call["name"], call["parameters"]) for call in value]
        )
        return [event for name, given in calls for event in (CallStart(name), CallArguments(_dumped(given)))]


def _dumped(value: Any) -> str:
    """Return JSON that can be sent: half a surrogate pair cannot, except as an escape.

    Raises `ValueError` for a number beyond those that JSON's readers know.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.encode("utf-8", "ignore").decode() == text else json.dumps(value)
