"""Memory in large pages: one anonymous mapping, cut into tensors.

Reading weights is what a decode step costs, and with pages of 4 KB much of it is looking up addresses. The usual
allocators ask for no other pages; a mapping that is aligned and marked gets those of 2 MB, where the system lets it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["ALIGNMENT", "HUGE_PAGE", "Arena", "GrowingArena", "huge_pages_setting"]

HUGE_PAGE = 2 << 20
"""Bytes of a large page."""
ALIGNMENT = 64
"""Bytes: where tensors begin, so that rows of whole cache lines stay whole."""

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages_setting(path: Path = _SETTING) -> str:
    """Return what the system does about large pages: `always`, `madvise`, `never`, or `unknown`."""
    try:
        text = path.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"


class Arena:
    """`num_bytes` of zeroed memory, aligned to a large page and marked to be made of them.

    Pages are taken from the system when they are first written. The memory goes back to the system when the arena and
    all tensors cut from it are gone; there is no giving back of a single tensor.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ValueError(f"an arena holds at least 1 byte, got {num_bytes}")
        # The mapping may begin at any small page: one large page more leaves room to align. Not shared, or the pages
        # would be those of shared memory, for which the system has another setting.
        length = num_bytes + HUGE_PAGE
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, length, **private)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next = -address % HUGE_PAGE
        self._end = self._next + num_bytes
        self.marked = self._mark(self._next, num_bytes)

    def _mark(self, start: int, num_bytes: int) -> bool:
        """Ask for large pages; a kernel without them refuses, which costs speed alone."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        whole = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE, start, min(whole, len(self._memory) - start))
        except OSError:
            return False
        return True

    @staticmethod
    def bytes_for(shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes a tensor takes, the gap behind it included: sum these to size an arena."""
        return math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT

    @property
    def bytes_left(self) -> int:
        """Bytes not yet cut."""
        return self._end - self._next

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Cut a contiguous tensor that begins at a multiple of 64 bytes; never written memory is zero.

        Raises `ValueError` where it does not fit into what is left.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if count * dtype.itemsize > self.bytes_left:
            raise ValueError(
                f"{list(shape)} of {dtype} takes {count * dtype.itemsize} bytes, the arena has {self.bytes_left} "
                "left; size it by the sum of Arena.bytes_for"
            )
        offset = self._next
        self._next = min(offset + self.bytes_for(shape, dtype), self._end)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class GrowingArena:
    """Arenas one after the other, for those who do not know beforehand how much they will keep."""

    CHUNK = 64 << 20
    """Bytes of an arena; more where one tensor takes more. What is not written is not taken from the system."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Cut a contiguous tensor, as `Arena.empty` does."""
        needed = Arena.bytes_for(shape, dtype)
        if self._arena is None or self._arena.bytes_left < needed:
            self._arena = Arena(max(needed, self.CHUNK))
        return self._arena.empty(shape, dtype)
