"""How many blocks, and how long a request may be: decided once, before KV memory is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.errors import ConfigError
from headrace.core.interfaces.kv_cache import KVCacheLayout
from headrace.core.kv.layout import blocks_needed

__all__ = ["DEFAULT_KV_BYTES", "PoolRequest", "PoolSize", "size_pool"]

DEFAULT_KV_BYTES = 2 * 2**30
"""Most a pool takes where nobody says how much."""


@dataclass(frozen=True)
class PoolRequest:
    """What the pool's size follows from."""

    layout: KVCacheLayout
    max_num_seqs: int
    max_model_len: int
    max_model_len_is_given: bool
    """Whether the user asked for this length; otherwise it is the model's and may be lowered."""
    max_tokens_in_flight: int
    available_bytes: int
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None


@dataclass(frozen=True)
class PoolSize:
    """The pool, and the longest request it serves."""

    num_blocks: int
    max_model_len: int
    notes: list[str] = field(default_factory=list)
    """Lines for the start-up report."""


def size_pool(ask: PoolRequest) -> PoolSize:
    """Size the pool. Raises `ConfigError` where memory is short, with both numbers and what to change.

    Default: the smallest of what `max_num_seqs` requests of `max_model_len` need, 2 GiB, and a quarter of the
    memory available.
    """
    page = ask.layout.page_bytes
    lone = blocks_needed(ask.layout, ask.max_model_len, ask.max_tokens_in_flight)
    if ask.num_kv_blocks is not None:
        num_blocks, option = ask.num_kv_blocks, "num_kv_blocks"
    elif ask.kv_cache_memory is not None:
        num_blocks, option = ask.kv_cache_memory // page, "kv_cache_memory"
    else:
        limit = min(DEFAULT_KV_BYTES, ask.available_bytes // 4)
        num_blocks, option = min(ask.max_num_seqs * lone, limit // page), "kv_cache_memory"
    if num_blocks * page > ask.available_bytes:
        raise ConfigError(
            f"{option} asks for {_bytes(num_blocks * page)} of KV cache, and {_bytes(ask.available_bytes)} of memory "
            f"are available; lower {option}",
            option=option,
        )
    if lone <= num_blocks:
        return PoolSize(num_blocks, ask.max_model_len)
    longest = _longest(ask, num_blocks)
    shortage = (
        f"a request of max_model_len {ask.max_model_len} tokens needs {_bytes(lone * page)} of KV cache "
        f"({lone} blocks), and there are {_bytes(num_blocks * page)} ({num_blocks} blocks), enough for {longest} "
        "tokens"
    )
    if ask.max_model_len_is_given or longest < 2:
        raise ConfigError(
            f"{shortage}; raise kv_cache_memory (or num_kv_blocks), or set max_model_len to at most {longest}",
            option="max_model_len",
        )
    return PoolSize(num_blocks, longest, [f"max_model_len lowered to {longest}: {shortage}"])


def _longest(ask: PoolRequest, num_blocks: int) -> int:
    """Return the most tokens of a lone request that `num_blocks` hold."""
    low, high = 0, ask.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_needed(ask.layout, middle, ask.max_tokens_in_flight) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
