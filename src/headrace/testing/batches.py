"""Ragged, paged attention batches with traps: what the conformance kit feeds a backend.

A `PagedRun` owns one layer's cache and some sequences with random Q, K and V. Its traps are those of a real engine:
block ids are shuffled; every slot that no token has reached, in unused blocks and behind the end of partly filled
ones, holds NaN; table entries past a sequence or behind its window name a block full of NaN; `out` starts as NaN; and
the memory of a batch is overwritten once its step is done.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from headrace.core.interfaces import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    KVCacheGroup,
)
from headrace.testing.cases import AttentionCase, Chunk
from headrace.testing.compare import TOLERANCES, check_close, torch_threads
from headrace.testing.reference import reference_attention

__all__ = ["SPARE_BLOCKS", "PagedRun", "run_case"]

SPARE_BLOCKS = 4
"""Blocks that belong to no sequence, full of NaN."""


class PagedRun:
    """Sequences in one layer's pages. `seed` fixes Q, K and V, `table_seed` which blocks hold them."""

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        lengths: Sequence[int],
        *,
        seed: int,
        table_seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.backend, self.spec, self.device = backend, spec, device
        dtype = getattr(torch, spec.dtype)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        # Scores with a deviation of 2: weights differ enough that a wrong key shows.
        self.q = [(2 * draw(n, heads, dim)).to(dtype).to(device) for n in lengths]
        self.k = [draw(n, kv_heads, dim).to(dtype).to(device) for n in lengths]
        self.v = [draw(n, kv_heads, dim).to(dtype).to(device) for n in lengths]
        if spec.kv_dtype == "int8":
            # Numbers that survive being rounded: what is compared is the attention.
            self.k, self.v = ([_whole(x) for x in kept] for kept in (self.k, self.v))
        self.layer = AttentionLayer(
            name="layers.0.attention",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks=draw(heads).to(device) if spec.sinks else None,
            causal=spec.causal,
        )
        self.group = KVCacheGroup(window=spec.window, layers=(self.layer.name,))
        self._rng = random.Random(table_seed)
        size = spec.block_size
        counts = [math.ceil(n / size) for n in lengths]
        self.num_blocks = sum(counts) + SPARE_BLOCKS
        ids = list(range(self.num_blocks))
        self._rng.shuffle(ids)
        self._spare = ids[:SPARE_BLOCKS]
        at = SPARE_BLOCKS
        self._tables = []
        for count in counts:
            self._tables.append(ids[at : at + count])
            at += count
        self.cache = backend.allocate(spec, self.num_blocks, device)
        self.poison(self.cache)

    def poison(self, cache: Any) -> None:
        """Fill every slot of a cache with NaN, through the backend's own `write`."""
        size = self.spec.block_size
        count = self.num_blocks * size
        batch = AttentionBatch(
            query_start=torch.arange(0, count + 1, size, dtype=torch.int32),
            seq_lens=torch.full((self.num_blocks,), size, dtype=torch.int32),
            positions=torch.arange(size, device=self.device).repeat(self.num_blocks),
            block_table=torch.arange(self.num_blocks, dtype=torch.int32, device=self.device)[:, None],
            slot_mapping=torch.arange(count, device=self.device),
            max_query_len=size,
            max_seq_len=size,
        )
        shape = (count, self.spec.num_kv_heads, self.spec.head_dim)
        nan = torch.full(shape, math.nan, dtype=getattr(torch, self.spec.dtype), device=self.device)
        self.backend.write(self.layer, nan, nan, cache, self.backend.prepare(self.group, batch))

    def batch(self, chunks: Sequence[Chunk]) -> AttentionBatch:
        """The step that computes `chunks`, in that order."""
        size = self.spec.block_size
        width = max(len(self._tables[chunk.sequence]) for chunk in chunks) + self._rng.randint(0, 2)
        table: list[list[int]] = []
        slots: list[int] = []
        positions: list[int] = []
        starts = [0]
        for chunk in chunks:
            own = self._tables[chunk.sequence]
            behind = 0 if self.spec.window is None else max(0, chunk.begin - self.spec.window + 1) // size
            reached = math.ceil(chunk.end / size)
            table.append(
                [own[i] if behind <= i < reached else self._rng.choice(self._spare) for i in range(width)]
            )
            positions += range(chunk.begin, chunk.end)
            slots += [own[p // size] * size + p % size for p in range(chunk.begin, chunk.end)]
            starts.append(starts[-1] + chunk.end - chunk.begin)
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32),
            positions=torch.tensor(positions, device=self.device),
            block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            max_query_len=max(chunk.end - chunk.begin for chunk in chunks),
            max_seq_len=max(chunk.end for chunk in chunks),
        )

    def inputs(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K and V of a step's tokens: views of one tensor, as of a stacked product."""
        stacked = torch.cat(
            [torch.cat([x[c.sequence][c.begin : c.end] for c in chunks]) for x in (self.q, self.k, self.v)],
            dim=1,
        )
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        q, k, v = stacked.split(heads, dim=1)
        return q, k, v

    def attend(
        self, chunks: Sequence[Chunk], md: Any, *, cache: Any = None, lse: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Call `forward` alone; return what it filled in, chunk by chunk."""
        q = self.inputs(chunks)[0]
        before = q.clone()
        out = torch.full(q.shape, math.nan, dtype=q.dtype, device=self.device)
        sums = torch.full(q.shape[:2], math.nan, device=self.device) if lse else None
        self.backend.forward(self.layer, q, self.cache if cache is None else cache, md, out, sums)
        if not torch.equal(q, before):
            raise AssertionError(f"{self.backend.name}: forward changed q")
        counts = [chunk.end - chunk.begin for chunk in chunks]
        return list(out.split(counts)), None if sums is None else list(sums.split(counts))

    def write(self, chunks: Sequence[Chunk], md: Any, *, cache: Any = None) -> None:
        """Call `write` alone."""
        _, k, v = self.inputs(chunks)
        before = k.clone(), v.clone()
        self.backend.write(self.layer, k, v, self.cache if cache is None else cache, md)
        if not (torch.equal(k, before[0]) and torch.equal(v, before[1])):
            raise AssertionError(f"{self.backend.name}: write changed k or v")

    def step(
        self, chunks: Sequence[Chunk], *, lse: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """One whole step: `prepare`, `write`, `forward`; then the batch's memory is overwritten."""
        batch = self.batch(chunks)
        md = self.backend.prepare(self.group, batch)
        self.write(chunks, md)
        result = self.attend(chunks, md, lse=lse)
        for tensor in (
            batch.query_start,
            batch.seq_lens,
            batch.positions,
            batch.block_table,
            batch.slot_mapping,
        ):
            tensor.fill_(-1)
        return result

    def expected(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """What is right for a chunk: (out, lse), float64."""
        s, begin, end = chunk
        # One thread: the reference's products are too small to share.
        with torch_threads(1):
            return reference_attention(
                self.q[s][begin:end],
                self.k[s][:end],
                self.v[s][:end],
                first=begin,
                scale=self.layer.scale,
                window=self.layer.window,
                soft_cap=self.layer.soft_cap,
                sinks=self.layer.sinks,
                causal=self.layer.causal,
            )

    def check(
        self, chunks: Sequence[Chunk], result: tuple[list[torch.Tensor], list[torch.Tensor] | None], what: str
    ) -> None:
        """Compare a step's result with the reference. Raises `AssertionError` naming the chunk."""
        tolerance = TOLERANCES[self.spec.dtype]
        for i, chunk in enumerate(chunks):
            out, lse = self.expected(chunk)
            words = f"{what}, {chunk} of {len(chunks)} chunks, {self.spec}"
            check_close(result[0][i], out, tolerance, f"out of {words}")
            if result[1] is not None:
                check_close(result[1][i], lse, tolerance, f"lse of {words}")


def _whole(x: torch.Tensor) -> torch.Tensor:
    """x [n, K, D] as a cache of whole numbers with a scale for each token and head gives it back."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    return (torch.round(x.float() / scales) * scales).to(x.dtype)


def run_case(backend: AttentionBackend, case: AttentionCase, device: str = "cpu") -> None:
    """Run a case's steps and compare every token with the reference. Raises `AssertionError`."""
    run = PagedRun(backend, case.spec, case.lengths, seed=case.seed, table_seed=case.seed, device=device)
    for i, chunks in enumerate(case.steps):
        run.check(chunks, run.step(chunks, lse=case.lse), f"{backend.name}, case {case.seed}, step {i}")
