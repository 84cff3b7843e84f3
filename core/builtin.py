"""What core itself provides, registered as any plugin would."""

from __future__ import annotations

from typing import Any

from headrace.core.plugin.hookspecs import hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "core"
headrace_api = ">=1,<2"


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
    registrar.stash_key(LOGPROBS)
    registrar.stash_key(PROMPT_LOGPROBS)
