"""The start-up report: what a user reads to know what runs, and to tune it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["StartupReport"]


class StartupReport(msgspec.Struct, kw_only=True, frozen=True):
    """Facts of a started engine, in plain values; `lines` spells them out."""

    model: str
    path: str
    executor: dict[str, Any]
    """What the executor says of model, types, backend and threads."""
    num_blocks: int
    block_size: int
    page_bytes: int
    """Bytes of a KV block of one group."""
    windows: list[int | None]
    """A KV group: how many tokens its layers look back; None: all."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    prefix_caching: bool
    executor_name: str
    plugins: list[str]
    notes: list[str]
    seconds: float

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache; touched only where it is used."""
        return self.num_blocks * self.page_bytes

    @property
    def concurrency(self) -> float:
        """How many requests of full length the pool holds at once."""
        tokens = self.num_blocks * self.block_size / len(self.windows)
        return tokens / self.max_model_len

    def lines(self) -> list[str]:
        """The report, a line a topic."""
        facts = self.executor
        refused = [f"{name} not taken: {', '.join(why)}" for name, why in facts["attention_refused"].items()]
        promise = (
            "batch-invariant: yes (the same tokens whatever else runs)"
            if facts["row_invariant"]
            else "batch-invariant: no (ties in float32 may fall either way)"
        )
        drafts = facts.get("proposer")
        judged = (
            ""
            if facts.get("token_equal", True)
            else ", by rejection sampling: NOT the tokens of a run without"
        )
        return [
            f"model        {self.model}: {facts['architecture']}, {facts['parameters'] / 1e6:.1f}M parameters",
            f"weights      {facts['weights_bytes'] / 2**20:.0f} MiB as {_held(facts)} on {facts['device']}",
            f"threads      {facts['threads']}: {facts['threads_why']}",
            f"KV cache     {self.kv_bytes / 2**20:.0f} MiB as {facts.get('kv_dtype', facts['dtype'])}, "
            f"{self.num_blocks} blocks of {self.block_size} tokens; {self.concurrency:.1f} requests of "
            f"{self.max_model_len} tokens at once (kv_cache_memory)",
            f"scheduler    {self.policy}, at most {self.max_num_seqs} requests (max_num_seqs) and "
            f"{self.max_num_batched_tokens} tokens a step (max_num_batched_tokens)",
            f"caching      prefix caching {'on' if self.prefix_caching else 'off'}",
            f"attention    {'; '.join([facts['attention_backend'], *refused])}",
            f"ops          {', '.join(facts['op_sets'])}; {promise}",
            f"graph        {facts['graph']}",
            *([f"drafts       by {drafts} (speculative_method){judged}"] if drafts else []),
            f"parallel     {self.executor_name}, {facts['workers']} worker",
            f"numerics     {facts['fingerprint']}",
            f"plugins      {', '.join(self.plugins)}",
            *(f"note         {note}" for note in self.notes),
            f"ready in     {self.seconds:.1f} s",
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _held(facts: Mapping[str, Any]) -> str:
    """How weights are held, and what runs those that are quantized."""
    method = facts.get("quantization")
    if method is None:
        return str(facts["dtype"])
    formats = ", ".join(
        f"{name} by {ops}" for name, ops in facts["linear_formats"].items() if name != "dense"
    )
    return f"{method} ({formats or 'nothing was to be quantized'}), computed in {facts['dtype']},"
