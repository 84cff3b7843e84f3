"""The paged KV cache manager: block tables by group, a hash-chained prefix cache, one pool, one fence."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from headrace.core.interfaces.build import KVCacheBuild
from headrace.core.interfaces.kv_cache import KVCacheGroup, PrefixHit
from headrace.core.kv.block_pool import NULL_BLOCK, BlockPool
from headrace.core.kv.hashing import block_hash
from headrace.core.kv.layout import blocks_needed, group_need
from headrace.core.metrics import series_name
from headrace.core.request import Request

__all__ = ["PagedKVCacheManager"]


class PagedKVCacheManager:
    """Implements `KVCacheManager`; the contract's docstrings hold.

    Terms: *table*, a request's block ids in one group; *full block*, one whose tokens are all confirmed and
    computed. Half-open ranges of one request in a window group, in blocks:

        [0, released)           null blocks: behind the window, given back
        [released, published)   full, offered to the prefix cache
        [published, len(table)) still filling, or scheduled, or lookahead
    """

    def __init__(self, build: KVCacheBuild) -> None:
        self._layout = build.layout
        self._groups: Sequence[KVCacheGroup] = build.layout.groups
        self._windows = [(i, g.window) for i, g in enumerate(self._groups) if g.window is not None]
        self._block_size = build.layout.block_size
        self._caching = build.prefix_caching
        self._max_in_flight = build.max_tokens_in_flight
        self._pool = BlockPool(build.num_blocks)
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._num_fenced = 0
        self._updated_step = -1
        self._coming: dict[bytes, str] = {}
        """Full blocks that plans under way compute, and the requests they are of."""
        self._queries = 0
        self._hits = 0
        self._seconds = 0.0
        self._info = series_name(
            "cache_config_info",
            block_size=str(self._block_size),
            num_gpu_blocks=str(build.num_blocks),  # the field's name for it, on a CPU too
            enable_prefix_caching=str(self._caching),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached or not."""
        return self._pool.num_free

    @property
    def num_fenced(self) -> int:
        """Freed blocks that wait for plans in flight."""
        return self._num_fenced

    # Prefix cache ------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixHit:
        """Find and pin the longest cached prefix that all groups have."""
        limit = (request.num_tokens - 1) // self._block_size
        if not self._caching or limit <= 0:
            return PrefixHit(0, tuple(() for _ in self._groups))
        started = time.perf_counter()
        self._extend_hashes(request, limit)
        hashes = request.block_hashes
        length = limit
        for index, group in enumerate(self._groups):
            if group.window is None:
                length = self._leading_hits(index, hashes, length)
        length = self._shorten_to_windows(hashes, length)
        tables = tuple(
            self._hit_table(index, group, hashes, length) for index, group in enumerate(self._groups)
        )
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self._pool.hold(block)
        coming = length < limit and hashes[length] in self._coming
        self._seconds += time.perf_counter() - started
        return PrefixHit(length * self._block_size, tables, coming)

    def release(self, hit: PrefixHit) -> None:
        """Unpin a hit that is not used."""
        for table in hit.block_ids:
            self._pool.drop(block for block in reversed(table) if block != NULL_BLOCK)

    def _leading_hits(self, index: int, hashes: Sequence[bytes], limit: int) -> int:
        for i in range(limit):
            if self._pool.lookup(index, hashes[i]) is None:
                return i
        return limit

    def _shorten_to_windows(self, hashes: Sequence[bytes], length: int) -> int:
        """Return the largest length ≤ `length` whose window blocks all groups have."""
        settled = False
        while length and not settled:
            settled = True
            for index, group in enumerate(self._groups):
                if group.window is None:
                    continue
                first = self._first_visible(group.window, length * self._block_size)
                for i in range(length - 1, first - 1, -1):
                    if self._pool.lookup(index, hashes[i]) is None:
                        # No prefix that ends behind block i and still sees it can be valid.
                        length, settled = i, False
                        break
        return length

    def _hit_table(
        self, index: int, group: KVCacheGroup, hashes: Sequence[bytes], length: int
    ) -> tuple[int, ...]:
        first = 0 if group.window is None else self._first_visible(group.window, length * self._block_size)
        found = [self._pool.lookup(index, hashes[i]) for i in range(first, length)]
        return tuple([NULL_BLOCK] * min(first, length) + [b for b in found if b is not None])

    def _first_visible(self, window: int, num_computed: int) -> int:
        """Index of the first block that the token at position `num_computed` sees."""
        return max(0, num_computed - window + 1) // self._block_size

    def _extend_hashes(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self._block_size
        while len(hashes) < count:
            start = len(hashes) * size
            hashes.append(
                block_hash(
                    hashes[-1] if hashes else b"",
                    request.token_ids[start : start + size],
                    request.engine_request.block_keys,
                    start,
                )
            )

    # Allocation --------------------------------------------------------------------------------------

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks a lone request of `num_tokens` tokens ever holds at once, over all groups."""
        return blocks_needed(self._layout, num_tokens, self._max_in_flight)

    def shortfall(self, request: Request, num_tokens: int) -> int:
        """Blocks `request` still lacks to reach `num_tokens` tokens."""
        lacking = 0
        for index, group in enumerate(self._groups):
            held = len(request.block_ids[index]) - request.num_released[index] if request.block_ids else 0
            need = group_need(group, num_tokens, self._block_size, self._max_in_flight)
            lacking += max(0, need - held)
        return lacking

    def allocate(
        self, request: Request, num_tokens: int, *, lookahead: int = 0, hit: PrefixHit | None = None
    ) -> list[list[int]] | None:
        """Give `request` blocks for positions [0, num_tokens + lookahead), or change nothing."""
        blocks = -(-(num_tokens + lookahead) // self._block_size)
        if hit is None and request.block_ids and len(request.block_ids[0]) >= blocks:
            self._announce(request, num_tokens)
            return []  # all tables are of one length
        starts: Sequence[Sequence[int]] = (
            hit.block_ids if hit is not None else request.block_ids or [()] * len(self._groups)
        )
        missing = [max(0, blocks - len(start)) for start in starts]
        if sum(missing) > self._pool.num_free:
            return None
        granted = [self._pool.take(count) for count in missing]
        if hit is not None:
            self._queries += request.num_tokens
            self._hits += hit.length
            granted = [[*pinned, *fresh] for pinned, fresh in zip(hit.block_ids, granted, strict=True)]
        if not request.block_ids:
            cached = hit.length // self._block_size if hit is not None else 0
            request.block_ids = [[] for _ in self._groups]
            request.num_published = cached
            request.num_released = [
                0 if hit is None else sum(1 for b in table if b == NULL_BLOCK) for table in granted
            ]
        for table, new in zip(request.block_ids, granted, strict=True):
            table.extend(new)
        self._announce(request, num_tokens)
        return granted

    def _announce(self, request: Request, num_tokens: int) -> None:
        """Full blocks below `num_tokens` are about to be computed."""
        full = min(num_tokens, len(request.token_ids)) // self._block_size
        if self._caching and full > request.num_published:
            started = time.perf_counter()
            self._extend_hashes(request, full)
            for name in request.block_hashes[request.num_published : full]:
                self._coming.setdefault(name, request.request_id)
            self._seconds += time.perf_counter() - started

    def _withdraw(self, request: Request, first: int, end: int | None = None) -> None:
        """Blocks [first, end) of a request are not under way any more."""
        for name in request.block_hashes[first:end]:
            if self._coming.get(name) == request.request_id:
                del self._coming[name]

    def publish(self, request: Request, num_computed: int, *, fence: int) -> None:
        """Offer full blocks to the prefix cache, and give back what fell behind a window."""
        full = min(num_computed, len(request.token_ids)) // self._block_size
        if self._caching and full > request.num_published:
            started = time.perf_counter()
            self._extend_hashes(request, full)
            self._withdraw(request, request.num_published, full)
            for index, table in enumerate(request.block_ids):
                for i in range(request.num_published, full):
                    if table[i] != NULL_BLOCK:
                        self._pool.publish(index, request.block_hashes[i], table[i])
            request.num_published = full
            self._seconds += time.perf_counter() - started
        for index, window in self._windows:
            self._release_behind(request, index, self._first_visible(window, num_computed), fence)

    def _release_behind(self, request: Request, index: int, first: int, fence: int) -> None:
        table, released = request.block_ids[index], request.num_released[index]
        if first > released:
            self._drop_behind_fence(table[released:first], fence)
            table[released:first] = [NULL_BLOCK] * (first - released)
            request.num_released[index] = first

    def forget(self, request: Request, num_computed: int) -> None:
        """The KV of `request` from position `num_computed` on is lost: nobody may find it."""
        first = num_computed // self._block_size
        self._withdraw(request, first)
        for table in request.block_ids:
            for block in table[first:]:
                if block != NULL_BLOCK:
                    self._pool.forget(block)

    def free(self, request: Request, *, fence: int) -> None:
        """Give back all blocks of `request`, tails first, once step `fence` has been updated."""
        for table, released in zip(request.block_ids, request.num_released, strict=True):
            self._drop_behind_fence(table[released:][::-1], fence)
        self._withdraw(request, request.num_published)
        request.block_ids = []
        request.num_published = 0
        request.num_released = []

    # Fence -------------------------------------------------------------------------------------------

    def _drop_behind_fence(self, blocks: list[int], fence: int) -> None:
        if fence <= self._updated_step:
            self._pool.drop(blocks)
        elif blocks:
            self._fenced.append((fence, blocks))
            self._num_fenced += len(blocks)

    def advance_fence(self, step: int) -> None:
        """Every plan up to `step` has been updated."""
        self._updated_step = step
        while self._fenced and self._fenced[0][0] <= step:
            blocks = self._fenced.popleft()[1]
            self._num_fenced -= len(blocks)
            self._pool.drop(blocks)

    # Care --------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing changed, while any block is held."""
        if self._pool.num_free < self._pool.num_blocks:
            return False
        self._pool.forget_all()
        return True

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise `EngineError` unless counts, free list, cache and `requests` agree."""
        held = [b for request in requests for table in request.block_ids for b in table if b != NULL_BLOCK]
        held += [block for _, blocks in self._fenced for block in blocks]
        self._pool.check(held)

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name."""
        total, free = self._pool.num_blocks, self._pool.num_free
        return {
            "kv_blocks_total": total,
            "kv_blocks_free": free,
            "kv_blocks_cached": self._pool.num_cached,
            "kv_cache_usage_perc": 1 - free / total,
            "prefix_cache_queries": self._queries,
            "prefix_cache_hits": self._hits,
            "prefix_cache_seconds": self._seconds,
            self._info: 1,
        }
