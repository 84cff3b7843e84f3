"""The start-up report: what a user reads to know what runs, and to tune it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.config import EngineConfig
from headrace.core.interfaces import KVCacheLayout

__all__ = ["StartupReport"]


@dataclass(frozen=True)
class StartupReport:
    """Facts of a started engine; `lines` spells them out."""

    model: str
    path: Path
    config: EngineConfig
    executor: dict[str, Any]
    """What the executor says of model, types, backend and threads."""
    layout: KVCacheLayout
    num_blocks: int
    max_model_len: int
    plugins: list[str]
    notes: list[str]
    seconds: float

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache; touched only where it is used."""
        return self.num_blocks * self.layout.page_bytes

    @property
    def concurrency(self) -> float:
        """How many requests of full length the pool holds at once."""
        tokens = self.num_blocks * self.layout.block_size / len(self.layout.groups)
        return tokens / self.max_model_len

    def lines(self) -> list[str]:
        """The report, a line a topic."""
        facts, scheduler = self.executor, self.config.scheduler
        refused = [f"{name} not taken: {', '.join(why)}" for name, why in facts["attention_refused"].items()]
        caching = self.config.cache.prefix_caching and facts.get("causal", True)
        promise = (
            "batch-invariant: yes (the same tokens whatever else runs)"
            if facts["row_invariant"]
            else "batch-invariant: no (ties in float32 may fall either way)"
        )
        return [
            f"model        {self.model}: {facts['architecture']}, {facts['parameters'] / 1e6:.1f}M parameters",
            f"weights      {facts['weights_bytes'] / 2**20:.0f} MiB as {facts['dtype']} on {facts['device']}",
            f"threads      {facts['threads']}: {facts['threads_why']}",
            f"KV cache     {self.kv_bytes / 2**20:.0f} MiB, {self.num_blocks} blocks of "
            f"{self.layout.block_size} tokens; {self.concurrency:.1f} requests of {self.max_model_len} tokens at "
            "once (kv_cache_memory)",
            f"scheduler    {scheduler.policy}, at most {scheduler.max_num_seqs} requests (max_num_seqs) and "
            f"{scheduler.max_num_batched_tokens} tokens a step (max_num_batched_tokens)",
            f"caching      prefix caching {'on' if caching else 'off'}",
            f"attention    {'; '.join([facts['attention_backend'], *refused])}",
            f"ops          {', '.join(facts['op_sets'])}; {promise}",
            f"graph        {facts['graph']}",
            f"parallel     {self.config.parallel.executor}, {facts['workers']} worker",
            f"numerics     {facts['fingerprint']}",
            f"plugins      {', '.join(self.plugins)}",
            *(f"note         {note}" for note in self.notes),
            f"ready in     {self.seconds:.1f} s",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())
