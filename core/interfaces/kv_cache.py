"""The KV cache contract: what a layer stores, and who owns which block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from headrace.core.request import Request

__all__ = ["KVCacheGroup", "KVCacheLayout", "KVCacheManager", "KVCacheSpec", "PrefixHit"]


@dataclass(frozen=True)
class KVCacheSpec:
    """What one attention layer keeps a token. Models and proposers state one for each of their layers."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """Name of a torch dtype, `"bfloat16"`."""
    bytes_per_token: int
    """K and V of one token in one layer, scales included."""
    window: int | None = None
    """None: every earlier token is visible. w: a token sees itself and the w - 1 before it."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables: all see the same span, and each has a slot of its own in a page."""

    window: int | None
    layers: tuple[str, ...]
    """Layer i of the group lives in slot i of the group's pages."""


@dataclass(frozen=True)
class KVCacheLayout:
    """One pool of equal pages for all groups: a page holds `block_size` tokens of `num_slots` layers."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    num_slots: int
    page_bytes: int
    """Of one page, over its slots; a group with fewer layers than slots leaves the rest unused."""


@dataclass(frozen=True)
class PrefixHit:
    """Blocks that hold the KV of a request's first `length` tokens.

    Pinned: they are referenced until the hit goes to `allocate` or `release`, exactly once.
    """

    length: int
    block_ids: tuple[tuple[int, ...], ...]
    """A KV group: one id a block of the prefix; the null block where a window has passed."""
    coming: bool = False
    """Another request is computing the block behind `length` right now: who waits a step finds a longer prefix."""


@runtime_checkable
class KVCacheManager(Protocol):
    """Owns the block pool. Called by the scheduler on the engine's thread; knows no tensors.

    Freed blocks return to the pool when every plan sent before has been updated (the *fence*): the
    scheduler says which step it has sent last, and which has been updated.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold (the null block is not among them)."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached or not."""
        ...

    @property
    def num_fenced(self) -> int:
        """Freed blocks that wait for plans in flight."""
        ...

    def match_prefix(self, request: Request) -> PrefixHit:
        """Find and pin the longest cached prefix valid in **all** groups.

        Full layers need every block below its length, window layers those that meet the window. Capped so
        that at least one token is left to compute.
        """
        ...

    def release(self, hit: PrefixHit) -> None:
        """Unpin a hit that is not used."""
        ...

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks a lone request of `num_tokens` tokens ever holds at once, over all groups."""
        ...

    def shortfall(self, request: Request, num_tokens: int) -> int:
        """Blocks `request` still lacks to reach `num_tokens` tokens."""
        ...

    def allocate(
        self, request: Request, num_tokens: int, *, lookahead: int = 0, hit: PrefixHit | None = None
    ) -> list[list[int]] | None:
        """Give `request` blocks for positions [0, num_tokens + lookahead); return the new ids by group.

        With `hit`, its blocks come first and count as new. An empty list: nothing new was needed. None: the
        pool has too few; nothing changed and `hit` is still pinned.
        """
        ...

    def publish(self, request: Request, num_computed: int, *, fence: int) -> None:
        """Offer full blocks below `num_computed` (confirmed) to the prefix cache.

        Blocks that fell behind a window are freed here too, behind the fence.
        """
        ...

    def forget(self, request: Request, num_computed: int) -> None:
        """The KV of `request` from position `num_computed` on is lost: nobody may find it."""
        ...

    def free(self, request: Request, *, fence: int) -> None:
        """Give back all blocks of `request`, tails first, once step `fence` has been updated."""
        ...

    def advance_fence(self, step: int) -> None:
        """Every plan up to `step` has been updated."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing changed, while any block is held."""
        ...

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise `EngineError` unless counts, free list, cache and `requests` agree. Called when idle."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Gauges and counters by Prometheus name, without prefix."""
        ...
