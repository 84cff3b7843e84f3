"""The scheduler's state in plain values, for a person or a log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.core.interfaces.kv_cache import KVCacheManager
from headrace.core.metrics import series_name
from headrace.core.request import Request

__all__ = ["CAPACITY", "PREFIX", "snapshot", "waiting_by_reason"]

CAPACITY = "capacity"
"""Why a request waits that nobody parked: there is no place or no block for it yet."""

PREFIX = "prefix"
"""Why a request is parked whose next block another is computing."""


def snapshot(
    *, running: Iterable[Request], waiting: Iterable[Request], parked: Iterable[Request], kv: KVCacheManager
) -> dict[str, Any]:
    """Who runs, who waits and why, blocks; counts only, no token of anybody's."""
    return {
        "time": time.time(),
        "running": [_describe(request) for request in running],
        "waiting": [_describe(request) for request in waiting],
        "parked": [_describe(request) for request in parked],
        "kv_blocks": {"total": kv.num_blocks, "free": kv.num_free, "fenced": kv.num_fenced},
    }


def waiting_by_reason(parked: Iterable[Request], *, num_queued: int) -> Mapping[str, float]:
    """A gauge for each reason: the scheduler's own always, constraints' where they park somebody."""
    reasons = Counter({CAPACITY: num_queued, PREFIX: 0})
    reasons.update(request.wait_reason or "" for request in parked)
    return {
        series_name("num_requests_waiting_by_reason", reason=reason): count
        for reason, count in reasons.items()
    }


def _describe(request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "computed": request.num_computed,
        "blocks": sum(len(table) for table in request.block_ids),
        "preemptions": request.num_preemptions,
        "reason": request.wait_reason,
    }
