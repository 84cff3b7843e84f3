"""Finds where the bracket that a text begins with is closed, however the text comes in pieces."""

from __future__ import annotations

import re

__all__ = ["JSON_QUOTES", "PYTHON_QUOTES", "Brackets"]

JSON_QUOTES = '"'
PYTHON_QUOTES = "\"'"

MAX_DEPTH = 100
"""Brackets inside each other; what is deeper is no call."""


class Brackets:
    """Reads one text that grows.

    start: index of the bracket. quotes: what strings stand in; brackets inside strings do not count.
    """

    def __init__(self, start: int, quotes: str) -> None:
        self._at = start
        self._depth = 0
        self._quote = ""
        self._outside = re.compile(f"[][{{}}(){re.escape(quotes)}]")
        self._inside = {quote: re.compile(rf"[\\{quote}]") for quote in quotes}
        self.is_broken = False
        """It is nested too deep to be read."""

    def end_in(self, text: str) -> int | None:
        """Return the index behind the closing bracket; None: it is not there yet, or never, if `is_broken`.

        text: all of it so far; it goes on where the last call ended.
        """
        while not self.is_broken:
            pattern = self._inside[self._quote] if self._quote else self._outside
            found = pattern.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            self._at = found.end()
            character = found[0]
            if character == "\\":
                if self._at == len(text):  # what it escapes is yet to come
                    self._at -= 1
                    return None
                self._at += 1
            elif self._quote or character in PYTHON_QUOTES:
                self._quote = "" if self._quote else character
            elif character in "[{(":
                self._depth += 1
                self.is_broken = self._depth > MAX_DEPTH
            else:
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None
