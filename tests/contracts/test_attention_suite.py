"""The attention suite passes a simple backend that is right, and catches each of many that are not.

The simple backend computes every row alone, so it is row-invariant; the broken ones each change one thing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import SkipTest

import pytest
import torch

from headrace.backends.torch_reference.attention import TorchAttention
from headrace.core.interfaces import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    CacheSpec,
    KVCacheGroup,
)
from headrace.testing import AttentionBackendSuite

Pages = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Step:
    batch: AttentionBatch
    requests: list[int]
    """Of each token."""


class SimpleAttention:
    """Token by token, in float64; cache pages [num_blocks, B, K, D]."""

    name = "simple"
    row_invariant = True
    numerics = "float64"
    graph = "never"

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        reasons = [] if device == "cpu" else ["runs on cpu only"]
        if spec.dtype not in ("float32", "bfloat16"):
            reasons.append(f"no dtype {spec.dtype}")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"no KV dtype {spec.kv_dtype}")
        return reasons

    def layout(self, spec: AttentionSpec) -> CacheSpec:
        return CacheSpec(2 * spec.block_size * spec.num_kv_heads * spec.head_dim * 4)

    def allocate(self, spec: AttentionSpec, num_blocks: int, device: str) -> Pages:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Step:
        counts = batch.query_start.diff()
        copies = {name: value.clone() for name, value in vars(batch).items() if torch.is_tensor(value)}
        return Step(replace(batch, **copies), torch.arange(len(counts)).repeat_interleave(counts).tolist())

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Pages, md: Step) -> None:
        for pages, values in zip(cache, (k, v), strict=True):
            pages.flatten(0, 1)[md.batch.slot_mapping] = values.float()

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        for row, request in enumerate(md.requests):
            position = int(md.batch.positions[row])
            if not layer.causal:
                position = int(md.batch.seq_lens[request]) - 1
            positions = self.visible(position, layer)
            blocks = self.blocks(md.batch.block_table[request].long(), request)
            size = cache[0].shape[1]
            k, v = (pages[blocks[positions // size], positions % size].double() for pages in cache)
            out[row], sums = self.one(layer, q[row].double(), k, v)
            if lse is not None:
                lse[row] = sums

    def visible(self, position: int, layer: AttentionLayer) -> torch.Tensor:
        begin = 0 if layer.window is None else max(0, position - layer.window + 1)
        return torch.arange(begin, position + 1)

    def blocks(self, table: torch.Tensor, request: int) -> torch.Tensor:
        return table

    def one(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = [self.kv_head(head, layer) for head in range(layer.num_heads)]
        scores = (k[:, heads] * q).sum(-1) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        total = scores.logsumexp(0)
        if layer.sinks is not None:
            total = torch.logaddexp(total, layer.sinks.double())
        return ((scores - total).exp().unsqueeze(-1) * v[:, heads]).sum(0), total

    def kv_head(self, head: int, layer: AttentionLayer) -> int:
        return head // (layer.num_heads // layer.num_kv_heads)


class WideWindow(SimpleAttention):
    def visible(self, position: int, layer: AttentionLayer) -> torch.Tensor:
        window = None if layer.window is None else layer.window + 1
        return super().visible(position, replace(layer, window=window))


class NarrowWindow(SimpleAttention):
    def visible(self, position: int, layer: AttentionLayer) -> torch.Tensor:
        window = layer.window if layer.window is None or layer.window == 1 else layer.window - 1
        return super().visible(position, replace(layer, window=window))


class PastLength(SimpleAttention):
    """Attends to the whole last block, with a mask that adds -inf (0 · NaN is NaN)."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, cache, md, out, lse)
        size = cache[1].shape[1]
        for row, request in enumerate(md.requests):
            last = int(md.batch.positions[row]) // size
            tail = cache[1][int(md.batch.block_table[request, last])]
            out[row] += (0.0 * tail).sum((0, 1))


class SeesTheFuture(SimpleAttention):
    """Not causal inside a chunk."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        ends = md.batch.seq_lens[torch.tensor(md.requests)].long() - 1
        super().forward(layer, q, cache, Step(replace(md.batch, positions=ends), md.requests), out, lse)


class AlwaysCausal(SimpleAttention):
    """Does not look at `causal`."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(replace(layer, causal=True), q, cache, md, out, lse)


class NoSoftCap(SimpleAttention):
    def one(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().one(replace(layer, soft_cap=None), q, k, v)


class NoSinks(SimpleAttention):
    def one(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().one(replace(layer, sinks=None), q, k, v)


class LogBaseTwo(SimpleAttention):
    def one(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = super().one(layer, q, k, v)
        return out, sums / torch.log(torch.tensor(2.0))


class InterleavedHeads(SimpleAttention):
    def kv_head(self, head: int, layer: AttentionLayer) -> int:
        return head % layer.num_kv_heads


class FirstTable(SimpleAttention):
    """Uses its neighbour's blocks."""

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Step:
        step = super().prepare(group, batch)
        step.batch.block_table[:] = step.batch.block_table[0].clone()
        return step


class SortedTable(SimpleAttention):
    """Forgets the order of a block table."""

    def blocks(self, table: torch.Tensor, request: int) -> torch.Tensor:
        return table.sort().values


class KeepsTheBatch(SimpleAttention):
    """Keeps a reference into the runner's memory from one step to the next."""

    def __init__(self) -> None:
        self.tables: dict[torch.Size, torch.Tensor] = {}

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Step:
        table = self.tables.setdefault(batch.block_table.shape, batch.block_table)
        return super().prepare(group, replace(batch, block_table=table))


class OneStepState(SimpleAttention):
    """Keeps the step on itself, so that a second group overwrites the first."""

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> Step:
        self.step = super().prepare(group, batch)
        return self.step

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, cache, self.step, out, lse)


class SkipsLastRow(SimpleAttention):
    """Leaves a part of `out` as it was."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, cache, Step(md.batch, md.requests[:-1]), out, lse)


class RemembersKeys(SimpleAttention):
    """Attends to the K and V it was last given, not to those of the cache it is handed."""

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Pages, md: Step) -> None:
        super().write(layer, k, v, cache, md)
        self.last = cache

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, self.last, md, out, lse)


class ServesAnything(SimpleAttention):
    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        return []


class LyingTorch(TorchAttention):
    """Says row_invariant, though torch's sums change with the shape."""

    row_invariant = True


class LiesByNeighbours(SimpleAttention):
    """Changes the last bits where many rows are together."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, cache, md, out, lse)
        if md.batch.num_requests > 100:
            out *= 1 + 2**-20


class LiesByChunks(SimpleAttention):
    """Changes the last bits in chunks of more than one token."""

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Pages,
        md: Step,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        super().forward(layer, q, cache, md, out, lse)
        if md.batch.max_query_len > 200:
            out *= 1 + 2**-6


class LiesByThreads(SimpleAttention):
    """Sums in another order with two threads."""

    def one(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = super().one(layer, q, k, v)
        return (out * (1 + 2**-20) if torch.get_num_threads() > 1 else out), sums


def suite(backend: type[Any]) -> AttentionBackendSuite:
    class Suite(AttentionBackendSuite):
        dtypes = ("float32",)
        seeds = 20

        def make(self) -> AttentionBackend:
            made: AttentionBackend = backend()
            return made

    return Suite()


TESTS = [name for name in dir(AttentionBackendSuite) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
def test_a_simple_backend_passes(test: str) -> None:
    getattr(suite(SimpleAttention), test)()


@pytest.mark.parametrize(
    ("backend", "tests"),
    [
        (WideWindow, ["test_windows", "test_random_decodes", "test_random_mixed_batches"]),
        (NarrowWindow, ["test_windows", "test_random_decodes", "test_random_prefills"]),
        (PastLength, ["test_block_sizes", "test_random_prefills", "test_random_decodes"]),
        (SeesTheFuture, ["test_random_prefills", "test_random_mixed_batches", "test_random_chunks"]),
        (AlwaysCausal, ["test_layers_that_are_not_causal"]),
        (NoSoftCap, ["test_soft_caps", "test_random_decodes"]),
        (NoSinks, ["test_sinks", "test_random_decodes"]),
        (LogBaseTwo, ["test_log_sum_exp", "test_random_decodes"]),
        (InterleavedHeads, ["test_head_groups", "test_random_decodes"]),
        (FirstTable, ["test_random_prefills", "test_random_decodes", "test_two_groups_in_one_step"]),
        (SortedTable, ["test_block_sizes", "test_random_decodes", "test_random_chunks"]),
        (KeepsTheBatch, ["test_random_chunks", "test_random_mixed_batches"]),
        (OneStepState, ["test_two_groups_in_one_step"]),
        (SkipsLastRow, ["test_random_prefills", "test_random_decodes"]),
        (RemembersKeys, ["test_cache_is_all_that_forward_reads"]),
        (ServesAnything, ["test_declarations"]),
        (LyingTorch, ["test_row_invariance"]),
        (LiesByNeighbours, ["test_row_invariance"]),
        (LiesByChunks, ["test_row_invariance"]),
        (LiesByThreads, ["test_row_invariance"]),
    ],
)
def test_a_broken_backend_is_caught(backend: type[Any], tests: list[str]) -> None:
    for test in tests:
        with pytest.raises(AssertionError):
            getattr(suite(backend), test)()


class RefusesFeatures(SimpleAttention):
    row_invariant = False

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        reasons = super().why_not(spec, device)
        if spec.sinks:
            reasons.append("no sinks here")
        if spec.soft_cap is not None:
            reasons.append("no soft cap here")
        if spec.head_dim != 64:
            reasons.append(f"no head size {spec.head_dim} here")
        return reasons


def test_what_is_refused_is_skipped_with_the_reasons() -> None:
    with pytest.raises(SkipTest, match="no sinks here"):
        suite(RefusesFeatures).test_sinks()
    with pytest.raises(SkipTest, match="no soft cap here"):
        suite(RefusesFeatures).test_soft_caps()
    with pytest.raises(SkipTest, match="does not claim"):
        suite(RefusesFeatures).test_row_invariance()


def test_what_is_not_refused_still_runs() -> None:
    for test in ("test_head_sizes", "test_random_decodes", "test_log_sum_exp"):
        getattr(suite(RefusesFeatures), test)()


def test_make_must_be_defined() -> None:
    with pytest.raises(NotImplementedError, match="must define make"):
        AttentionBackendSuite().test_windows()
