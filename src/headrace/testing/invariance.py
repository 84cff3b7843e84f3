"""The row-invariance proofs: a row's result depends, bit for bit, on that row alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from headrace.core.interfaces import AttentionBackend, AttentionSpec
from headrace.testing.batches import PagedRun
from headrace.testing.cases import Chunk
from headrace.testing.compare import ROWS, check_equal, torch_threads

__all__ = ["prove_attention_invariant", "prove_rows_invariant"]

THREADS = (1, 2)


def prove_attention_invariant(backend: AttentionBackend, spec: AttentionSpec, device: str = "cpu") -> None:
    """Prove a backend that claims `row_invariant`. Raises `AssertionError`."""
    _prove_neighbours(backend, spec, device)
    _prove_cuts(backend, spec, device, length=100, single=(1, 2, 15, 16, 17, 33, 64, 99), decode_from=0)
    _prove_cuts(backend, spec, device, length=520, single=(257,), decode_from=510)


def _prove_neighbours(backend: AttentionBackend, spec: AttentionSpec, device: str) -> None:
    """Decodes in batches of `ROWS`, and beside a prefill, equal each decode alone."""
    rng = random.Random(5)
    lengths = [rng.randint(2, 40) for _ in range(max(ROWS))]
    lengths[1], lengths[12] = 300, 129
    lengths.append(45)
    run = PagedRun(backend, spec, lengths, seed=5, table_seed=5, device=device)
    decodes = [Chunk(s, n - 1, n) for s, n in enumerate(lengths[:-1])]
    prefill = Chunk(len(decodes), 0, lengths[-1])
    run.step([Chunk(s, 0, n - 1) for s, n in enumerate(lengths[:-1])])
    with torch_threads(THREADS[0]):
        alone = [run.step([chunk])[0][0] for chunk in [*decodes, prefill]]
    for threads in THREADS:
        with torch_threads(threads):
            for rows in ROWS:
                for chunks in (decodes[:rows], [*decodes[: rows // 2], prefill, *decodes[rows // 2 : rows]]):
                    found = run.step(chunks)[0]
                    for chunk, out in zip(chunks, found, strict=True):
                        what = (
                            f"{backend.name}: {chunk} in a batch of {len(chunks)}, {threads} threads, {spec}"
                        )
                        check_equal(out, alone[chunk.sequence], what)


def _prove_cuts(
    backend: AttentionBackend,
    spec: AttentionSpec,
    device: str,
    *,
    length: int,
    single: tuple[int, ...],
    decode_from: int,
) -> None:
    """One sequence as one chunk, with one cut or some, and token by token from `decode_from`: the same bits."""
    rng = random.Random(length)
    cuts = [[cut] for cut in single]
    cuts += [sorted(rng.sample(range(1, length), count)) for count in (1, 5)]
    cuts.append(list(range(max(1, decode_from), length)))
    whole = None
    for threads in THREADS:
        with torch_threads(threads):
            for number, inner in enumerate([[], *cuts]):
                # Another table each time: where a block lies must not matter either.
                run = PagedRun(backend, spec, (length,), seed=length, table_seed=number, device=device)
                edges = [0, *inner, length]
                parts = [run.step([Chunk(0, begin, end)])[0][0] for begin, end in pairwise(edges)]
                out = torch.cat(parts)
                whole = out if whole is None else whole
                what = f"{backend.name}: {length} tokens cut at {inner[:9]}, {threads} threads, {spec}"
                check_equal(out, whole, what)


def prove_rows_invariant(call: Callable[[slice], tuple[torch.Tensor, ...]], what: str) -> None:
    """Prove an op: `call(rows)` runs it on these rows of its inputs (of which there are `max(ROWS)`).

    Compares every batch of `ROWS` with each of its rows alone. Raises `AssertionError`.
    """
    with torch_threads(THREADS[0]):
        alone = [call(slice(row, row + 1)) for row in range(max(ROWS))]
    for threads, rows in _settings():
        with torch_threads(threads):
            for i, result in enumerate(call(slice(0, rows))):
                right = torch.cat([parts[i] for parts in alone[:rows]])
                check_equal(result, right, f"{what}: {rows} rows, {threads} threads, result {i}")


def _settings() -> Iterator[tuple[int, int]]:
    for threads in THREADS:
        for rows in ROWS:
            yield threads, rows
