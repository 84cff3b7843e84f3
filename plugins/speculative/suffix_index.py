"""One request's ids, and where the ids at their end stood before: found without looking through all of them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Match", "SuffixIndex"]

_CANDIDATES = 16
"""So many earlier places are compared, the latest first: what a step costs is bounded, however often ids recur."""


class Match(NamedTuple):
    """An earlier place that reads like the end."""

    length: int
    """Ids in common, counted up to the longest."""
    position: int
    """Of the id behind it."""


class SuffixIndex:
    """Grows with the request; both calls take a few microseconds.

    Each run of `shortest` ids is known by its last place, and each of its places by the one before: a chain to walk.

    Parameters
    ----------
    shortest, longest: ids that two places must have in common, and beyond which one is as good as another.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """Run of ids → where it ended last."""
        self._earlier: list[int] = [0]
        """By where a run ends: where it ended before; 0: nowhere."""
        self._source = self._run = 0
        """The id that comes next where the last match lies, and how many have been as there."""

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: list[int]) -> None:
        """Append plain ints."""
        own, n, last, earlier = self._ids, self._shortest, self._last, self._earlier
        begin = len(own) + 1
        own.extend(ids)
        if self._run and own[self._source : self._source + len(ids)] == ids:
            self._source += len(ids)
            self._run += len(ids)
        else:
            self._run = 0
        for end in range(begin, len(own) + 1):
            if end < n:
                earlier.append(0)
                continue
            run = tuple(own[end - n : end])
            earlier.append(last.get(run, 0))
            last[run] = end

    def match(self) -> Match | None:
        """Return the place that has most ids in common with the end, the latest of several; None: there is none.

        A place that went on as the request did stays, whatever else comes up.
        """
        if self._run >= self._longest:
            return Match(self._longest, self._source)
        best: Match | None = None
        place = self._earlier[-1]
        for _ in range(_CANDIDATES):
            if not place:
                break
            length = self._common(place)
            if best is None or length > best.length:
                best = Match(length, place)
                if length == self._longest:
                    break
            place = self._earlier[place]
        if best is not None:
            self._source, self._run = best.position, best.length
        return best

    def _common(self, place: int) -> int:
        """Return how many ids before `place` are as those at the end, of whom `shortest` are known to be."""
        ids, length = self._ids, self._shortest
        while length < min(self._longest, place) and ids[place - length - 1] == ids[-length - 1]:
            length += 1
        return length

    def following(self, position: int, count: int) -> list[int]:
        """Return the `count` ids from `position` on; where they run into the end, they go on as the copy does."""
        found = self._ids[position : position + count]
        for _ in range(count - len(found)):
            found.append(found[position - len(self._ids)])
        return found
