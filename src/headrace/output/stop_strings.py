"""Stop strings: found wherever they lie across tokens, and never shown in part.

Every character is looked at once. A stop string is followed only while the text's end is a beginning of it
(Knuth, Morris and Pratt's automaton, its table grown as far as the text goes), so that a thousand stop strings
cost nothing until the text meets one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopMatch", "StopMatcher"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    stop: str
    num_tokens: int
    """Tokens up to and including the one that completed it: those are kept."""


class StopMatcher:
    """Watches one answer's text for stop strings.

    The stop string that is completed first ends the text; of several completed by the same character, the first
    in the list. Text that may be the beginning of a stop string is held until that is decided.

    Parameters
    ----------
    stops: not empty strings.
    include: show the stop string; then nothing has to be held.
    min_tokens: a stop string completed by an earlier token than the `min_tokens`-th is ordinary text, for good.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._by_first: dict[str, list[int]] = {}
        for index, stop in enumerate(stops):
            self._by_first.setdefault(stop[0], []).append(index)
        self._include = include
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._active: dict[int, int] = {}
        """Pattern → how many of its first characters end the text so far; those with none are absent."""
        self._held = ""
        self.match: StopMatch | None = None
        """Set once; no more text is taken afterwards."""

    def push(self, text: str) -> str:
        """Take one token's text, which may be empty; return what can be shown now. Look at `match` then."""
        self._num_tokens += 1
        return self._scan(text)

    def flush(self, text: str = "") -> str:
        """End the text with what the last token left behind; return all that was held."""
        shown = self._scan(text)
        held, self._held = self._held, ""
        return shown + held

    def _scan(self, text: str) -> str:
        if self.match is not None:
            return ""
        for position, character in enumerate(text):
            starting = self._by_first.get(character)
            if not self._active and starting is None:
                continue
            completed = self._advance(character, starting or [])
            if completed is not None and self._num_tokens >= self._min_tokens:
                return self._end(self._held + text[: position + 1], self._patterns[completed].text)
        text = self._held + text
        hold = 0 if self._include else max(self._active.values(), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _advance(self, character: str, starting: list[int]) -> int | None:
        """Step the patterns the text is inside of; return the first in the list that is complete."""
        before, self._active = self._active, {}
        completed = []
        moves = [(index, self._patterns[index].step(state, character)) for index, state in before.items()]
        moves += [(index, 1) for index in starting if index not in before]
        for index, state in moves:
            pattern = self._patterns[index]
            if state == len(pattern.text):
                completed.append(index)
                state = pattern.border(state)
            if state:
                self._active[index] = state
        return min(completed, default=None)

    def _end(self, text: str, stop: str) -> str:
        self.match = StopMatch(stop, self._num_tokens)
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]


class _Pattern:
    """One stop string and how far to fall back when the text leaves it."""

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]

    def border(self, length: int) -> int:
        """Return the length of the longest proper prefix of `text[:length]` that also ends it."""
        text, borders = self.text, self._borders
        while len(borders) <= length:
            character = text[len(borders) - 1]
            state = borders[-1]
            while state and text[state] != character:
                state = borders[state]
            borders.append(state + 1 if text[state] == character else 0)
        return borders[length]

    def step(self, state: int, character: str) -> int:
        """Return how much of the pattern ends the text, when `state` characters did before `character` came."""
        while self.text[state] != character:
            if state == 0:
                return 0
            state = self.border(state)
        return state + 1
