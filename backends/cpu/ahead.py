"""Memory of the KV cache is taken from the system a little before steps write to it.

A large page is zeroed when it is first written. That takes a few tenths of a millisecond, and five where the machine
is a virtual one; all layers come to a new page in the same step, and every running request waits: 140 ms with 30
layers. Taken before, by all threads, and a few pages a step, they cost 15 steps 5 ms each. A thread that did it
meanwhile would take processors from the steps, which wait for the slowest of their own threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from headrace.backends.cpu.arena import HUGE_PAGE

__all__ = ["PagesAhead"]


class PagesAhead:
    """Cares for the caches of all layers. Their blocks come into use from the first on.

    Parameters
    ----------
    touch: (addresses, count, bytes) -> None: takes so much memory at each address, and changes nothing.
    at_once: pages that a step may take before they are needed; as many as there are threads.
    """

    def __init__(self, touch: Callable[..., None], at_once: int) -> None:
        self._touch = touch
        self._at_once = at_once
        self._pages: list[tuple[int, int]] = []
        """Those to be taken, the next one at the end: the first block that lies in it, and its address."""
        self._lead = 0
        """Blocks for which memory is taken before they are used: those of a page."""

    def add(self, cache: torch.Tensor) -> None:
        """Care for a cache [blocks, …], too; an end that fills no page is left to whoever writes there."""
        size = cache[0].nbytes
        starts = range(0, cache.nbytes - HUGE_PAGE + 1, HUGE_PAGE)
        self._pages += [(start // size, cache.data_ptr() + start) for start in starts]
        self._pages.sort(reverse=True)
        self._lead = max(self._lead, -(-HUGE_PAGE // size))

    def reach(self, block: int) -> None:
        """Blocks up to this one are about to be used: take their memory, and some of what lies behind."""
        taken: list[int] = []
        while self._pages:
            first, address = self._pages[-1]
            if first > block and (first > block + self._lead or len(taken) >= self._at_once):
                break
            taken.append(address)
            self._pages.pop()
        if taken:
            self._touch((ctypes.c_void_p * len(taken))(*taken), len(taken), HUGE_PAGE)
