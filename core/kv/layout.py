"""From what each layer stores to one pool of equal pages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from headrace.core.errors import ConfigError
from headrace.core.interfaces.kv_cache import KVCacheGroup, KVCacheLayout, KVCacheSpec

__all__ = ["blocks_needed", "group_need", "layout_for"]


def layout_for(
    specs: Mapping[str, KVCacheSpec],
    page_bytes: Mapping[str, int],
    block_size: int,
    storage: Mapping[str, Hashable] | None = None,
) -> KVCacheLayout:
    """Sort layers into groups of one window each, of as many layers as the rarest window has.

    Every group uses the same pages: slot i of a page serves layer i of whichever group holds the block. A model
    with 15 window and 3 full layers gets five window groups and one full group of three layers.

    page_bytes: of one page of each layer, as the attention backend wants it.
    storage: layers with equal values can share memory in a slot, others lie beside each other there; None: all can.
    """
    if not specs:
        raise ConfigError("the model declares no attention layer, so there is nothing to cache")
    by_window: dict[int | None, list[str]] = {}
    for name, spec in specs.items():
        by_window.setdefault(spec.window, []).append(name)
    slots = min(len(names) for names in by_window.values())
    groups = [
        KVCacheGroup(window, tuple(names[i : i + slots]))
        for window, names in by_window.items()
        for i in range(0, len(names), slots)
    ]
    groups.sort(key=lambda group: group.window is not None)  # full groups first: they bound a prefix hit
    largest: dict[Hashable, int] = {}
    for group in groups:
        for slot, name in enumerate(group.layers):
            key = slot, None if storage is None else storage[name]
            largest[key] = max(largest.get(key, 0), page_bytes[name])
    return KVCacheLayout(block_size, tuple(groups), slots, sum(largest.values()))


def group_need(group: KVCacheGroup, num_tokens: int, block_size: int, max_in_flight: int) -> int:
    """Most blocks that a lone request of `num_tokens` tokens ever holds at once in one group.

    max_in_flight: its tokens that plans in flight may hold.
    """
    need = -(-num_tokens // block_size)
    if group.window is None:
        return need
    # What is in flight lies behind what the window shows; both ends may cut a block.
    visible = group.window - 1 + max_in_flight
    return min(need, -(-visible // block_size) + 1)


def blocks_needed(layout: KVCacheLayout, num_tokens: int, max_in_flight: int) -> int:
    """The same over all groups."""
    return sum(group_need(group, num_tokens, layout.block_size, max_in_flight) for group in layout.groups)
