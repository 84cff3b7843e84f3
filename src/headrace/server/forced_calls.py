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
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return [Content(self._text)] if self._text else ()
        if self._name:
            return [CallStart(self._name), CallArguments(self._text.strip())]
        return [
            event
            for call in value
            for event in (CallStart(call["name"]), CallArguments(_dumped(call["parameters"])))
        ]


def _dumped(value: Any) -> str:
    """Return JSON that can be sent: half a surrogate pair cannot, except as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or text.encode("utf-8", "ignore").decode() == text else json.dumps(value)
