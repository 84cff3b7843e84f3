"""A doubly linked list of block ids in two arrays: O(1) at both ends and in the middle."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["FreeList"]


class FreeList:
    """Ids 1 … size, each at most once; 0 is the anchor: its neighbours are the two ends."""

    __slots__ = ("_len", "_next", "_prev")

    def __init__(self, size: int) -> None:
        self._next: list[int] = [*range(1, size + 1), 0]
        self._prev: list[int] = [size, *range(size)]
        self._len = size

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def pop_head(self) -> int:
        """Remove and return the first id; the list must not be empty."""
        block = self._next[0]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Take `block` out of the middle."""
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._len -= 1

    def push_head(self, block: int) -> None:
        """Put `block` first: the next to be taken."""
        self._insert(0, block, self._next[0])

    def push_tail(self, block: int) -> None:
        """Put `block` last."""
        self._insert(self._prev[0], block, 0)

    def _insert(self, before: int, block: int, after: int) -> None:
        self._prev[block] = before
        self._next[block] = after
        self._next[before] = block
        self._prev[after] = block
        self._len += 1
