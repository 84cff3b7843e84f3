"""What core itself provides, registered as any plugin would."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.core.metrics import Metric
from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["METRICS", "headrace_api", "headrace_register", "name"]

name = "core"
headrace_api = ">=1,<2"

METRICS: Mapping[str, Metric] = {
    "num_requests_running": Metric("gauge", "Requests that hold a place in the batch."),
    "num_requests_waiting": Metric("gauge", "Requests that wait, for whatever reason."),
    "num_requests_waiting_by_reason": Metric("gauge", "Requests that wait, by what they wait for."),
    "num_preemptions": Metric("counter", "Times a request lost its KV blocks to another."),
    "kv_blocks_total": Metric("gauge", "KV blocks there are."),
    "kv_blocks_free": Metric("gauge", "KV blocks nobody holds, cached ones included."),
    "kv_blocks_cached": Metric("gauge", "KV blocks the prefix cache can find."),
    "kv_cache_usage_perc": Metric("gauge", "Share of the KV blocks that is held, from 0 to 1."),
    "prefix_cache_queries": Metric("counter", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": Metric("counter", "Tokens found in the prefix cache."),
    "prefix_cache_seconds": Metric("counter", "Seconds spent on the prefix cache."),
    "cache_config_info": Metric("gauge", "How the KV cache is set up, as labels."),
}
"""What scheduler and KV cache manager tell of themselves."""


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register the unified scheduler, the paged KV cache manager and the built-in policies."""
    from headrace.core.kv.manager import PagedKVCacheManager
    from headrace.core.logprobs import LOGPROBS, PROMPT_LOGPROBS
    from headrace.core.scheduler.policies import FCFSPolicy, PriorityPolicy
    from headrace.core.scheduler.scheduler import UnifiedScheduler

    registrar.scheduler("unified", UnifiedScheduler)
    registrar.kv_cache_manager("paged", PagedKVCacheManager)
    registrar.scheduling_policy("fcfs", FCFSPolicy)
    registrar.scheduling_policy("priority", PriorityPolicy)
    for metric in METRICS:
        registrar.metric(metric, partial(METRICS.__getitem__, metric))
    registrar.stash_key(LOGPROBS)
    registrar.stash_key(PROMPT_LOGPROBS)
