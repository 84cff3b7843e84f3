"""Who holds which block, and which free blocks still hold something worth finding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.errors import EngineError
from headrace.core.kv.free_list import FreeList

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Stands where a window has passed; never granted, never freed, read by nobody."""

CacheKey = tuple[int, bytes]
"""KV group and chained hash."""


class BlockPool:
    """Reference counts, the free list and the prefix cache's map over blocks 1 … num_blocks.

    A block is *held* while its count is above 0 and *free* otherwise. A free block keeps its cache entry until
    it is granted again. The free list is an LRU: blocks without an entry are taken first, then the ones freed
    longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeList(num_blocks)
        self._refs = [0] * (num_blocks + 1)
        self._key_of: list[CacheKey | None] = [None] * (num_blocks + 1)
        self._block_of: dict[CacheKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with a cache entry, held or free."""
        return len(self._block_of)

    def take(self, count: int) -> list[int]:
        """Grant `count` free blocks, forgetting what was cached in them; there must be that many."""
        blocks = [self._free.pop_head() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self.forget(block)
        return blocks

    def hold(self, block: int) -> None:
        """Count one more holder; a free block leaves the free list."""
        if self._refs[block] == 0:
            self._free.remove(block)
        self._refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Count one holder less for each of `blocks`, in this order."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._key_of[block] is None:
                    self._free.push_head(block)
                else:
                    self._free.push_tail(block)
            elif self._refs[block] < 0:
                raise EngineError(f"KV block {block} was freed more often than it was held")

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        """Return the block that holds this content, or None."""
        return self._block_of.get((group, block_hash))

    def publish(self, group: int, block_hash: bytes, block: int) -> None:
        """Make a held, full block findable; where its content is known already, the older entry stays."""
        key = (group, block_hash)
        if self._key_of[block] is None and key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, block: int) -> None:
        """Drop a block's cache entry, if it has one."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    def forget_all(self) -> None:
        """Drop every cache entry; held blocks stay held."""
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()

    def check(self, held: Sequence[int]) -> None:
        """Raise `EngineError` unless counts equal `held` (one item a holder) and list and map agree."""
        counts = [0] * (self.num_blocks + 1)
        for block in held:
            counts[block] += 1
        counts[NULL_BLOCK] = 0
        if counts != self._refs:
            wrong = [b for b in range(self.num_blocks + 1) if counts[b] != self._refs[b]]
            raise EngineError(
                f"KV accounting is off: blocks {wrong[:8]} are counted {[self._refs[b] for b in wrong[:8]]} times "
                f"but held {[counts[b] for b in wrong[:8]]} times"
            )
        free = list(self._free)
        if len(free) != len(self._free) or set(free) != {
            b for b in range(1, self.num_blocks + 1) if not self._refs[b]
        }:
            raise EngineError("KV accounting is off: the free list is not the set of blocks without a holder")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise EngineError(f"KV accounting is off: block {block} and its cache entry disagree")
