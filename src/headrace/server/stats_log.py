"""The periodic line on throughput and load: quiet while the engine is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from headrace.core.errors import EngineError
from headrace.core.interfaces.build import EngineCalls

__all__ = ["log_stats", "stats_line"]

logger = logging.getLogger("headrace.stats")


def stats_line(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> str | None:
    """Say what an engine did between two readings of its metrics; None where it did nothing and does nothing.

    seconds: between the readings. An engine that was started anew in between counts from zero.
    """

    def since(name: str) -> float:
        latest, earlier = now.get(name, 0.0), before.get(name, 0.0)
        return latest - earlier if latest >= earlier else latest

    prompt, generated = since("prompt_tokens"), since("generation_tokens")
    running, waiting = now.get("num_requests_running", 0), now.get("num_requests_waiting", 0)
    if not (prompt or generated or running or waiting):
        return None
    parts = [
        f"prompts {prompt / seconds:.1f} tokens/s",
        f"answers {generated / seconds:.1f} tokens/s",
        f"running {running:.0f}",
        f"waiting {waiting:.0f}",
        f"KV cache {100 * now.get('kv_cache_usage_perc', 0):.1f} %",
    ]
    looked_up = since("prefix_cache_queries")
    if looked_up:
        parts.append(f"prefix cache hits {100 * since('prefix_cache_hits') / looked_up:.1f} %")
    preempted = since("num_preemptions")
    if preempted:
        parts.append(f"preemptions {preempted:.0f}")
    return ", ".join(parts)


async def log_stats(engine: EngineCalls, interval: float) -> None:
    """Log a line every `interval` seconds in which there is something to say, until cancelled.

    While the engine is gone nothing is said: who watches it does.
    """
    before: Mapping[str, float] = {}
    read_at: float | None = None
    while True:
        try:
            now = await engine.metrics()
        except EngineError:
            read_at = None
        else:
            read = time.monotonic()
            line = None if read_at is None else stats_line(before, now, read - read_at)
            if line is not None:
                logger.info(line)
            before, read_at = now, read
        await asyncio.sleep(interval)
