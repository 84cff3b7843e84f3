"""Where a step's keys and values lie: worked out once a step, used by every layer of a KV group.

A step falls into pieces. All requests with one token in the step are batched in groups of similar length, so
that a group's K and V fit a processor's cache; every longer chunk is a piece of its own (cut at `CHUNK_ROWS`
queries, which bounds the masks). A piece gathers the blocks that meet its visible span, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.core.interfaces.attention import AttentionBatch

__all__ = ["CHUNK_ROWS", "GROUP_SLOTS", "PagedCache", "Piece", "StepPages"]

CHUNK_ROWS = 512
"""Most queries in one piece of a prefill."""

GROUP_SLOTS = 2048
"""Most gathered slots (requests × padded length) in one piece of decodes."""


@dataclass(frozen=True)
class PagedCache:
    """One layer's pages: k and v, each [num_blocks, K, B, D]."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    """Where k and v are whole numbers: [num_blocks, K, B] float32, what each token's are multiplied with."""
    v_scales: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return int(self.k.shape[1])

    @property
    def block_size(self) -> int:
        """B, in tokens."""
        return int(self.k.shape[2])


@dataclass(frozen=True)
class Piece:
    """Some rows of a step and the slots they may see. n requests, K KV heads, S gathered slots a request."""

    rows: torch.Tensor | slice
    """Rows of q and out: an index [n] of decodes, or the slice of one request's chunk."""
    pages: torch.Tensor
    """[n · K · S / B] int64: which (block, KV head) pages to gather, by request, head and position."""
    num_requests: int
    slots: slice
    """Of the S gathered slots, those that hold the visible span."""
    unused: torch.Tensor | None
    """Flat index into [n, K, S] of gathered slots outside a request's span, or None."""
    visible: torch.Tensor | None
    """Bool, True where a query sees a slot: [n · K, 1, 1, S] for decodes, [rows, slots] for a chunk. None: the
    chunk is causal from position 0 or, for a layer that is not causal, sees every slot."""

    @property
    def is_decode(self) -> bool:
        """Whether the piece is a group of single-token rows."""
        return not isinstance(self.rows, slice)


class StepPages:
    """One step of one KV group, copied from the batch; pieces and slots are worked out when first asked for."""

    def __init__(self, batch: AttentionBatch) -> None:
        starts: list[int] = batch.query_start.tolist()
        self._starts = starts[:-1]
        self._counts = [end - start for start, end in pairwise(starts)]
        self._seq_lens: list[int] = batch.seq_lens.tolist()
        self._table = batch.block_table.long()
        self._slots = batch.slot_mapping.clone()
        self._pieces: dict[tuple[int, int, int | None, bool], list[Piece]] = {}
        self._targets: dict[tuple[int, int], torch.Tensor] = {}
        self._device = batch.block_table.device
        if self._table.data_ptr() == batch.block_table.data_ptr():
            self._table = self._table.clone()

    def targets(self, cache: PagedCache) -> torch.Tensor:
        """[N · K] int64: rows of the cache, seen as [num_blocks · K · B, D], where this step's tokens go."""
        num_heads, size = cache.num_kv_heads, cache.block_size
        key = (size, num_heads)
        if key not in self._targets:
            block, offset = self._slots // size, self._slots % size
            heads = torch.arange(num_heads, device=self._device)
            rows = (block[:, None] * num_heads + heads) * size + offset[:, None]
            self._targets[key] = rows.reshape(-1)
        return self._targets[key]

    def pieces(self, cache: PagedCache, window: int | None, *, causal: bool = True) -> list[Piece]:
        """The pieces of this step for a layer with this cache and window. `causal` False goes with no window."""
        key = (cache.block_size, cache.num_kv_heads, window, causal)
        if key not in self._pieces:
            decodes = [r for r, count in enumerate(self._counts) if count == 1]
            groups = self._decode_groups(decodes, cache.block_size, window)
            found = [self._decode_piece(group, cache, window) for group in groups]
            for r, count in enumerate(self._counts):
                if count > 1:
                    for first in range(0, count, CHUNK_ROWS):
                        rows = min(CHUNK_ROWS, count - first)
                        found.append(
                            self._chunk_piece(r, first, rows, cache, window)
                            if causal
                            else self._open_piece(r, first, rows, cache)
                        )
            self._pieces[key] = found
        return self._pieces[key]

    def _decode_groups(self, decodes: list[int], size: int, window: int | None) -> list[list[int]]:
        """Put requests of similar length together, at most `GROUP_SLOTS` slots a group."""
        groups: list[list[int]] = []
        widths = {r: _span(self._seq_lens[r], 1, window, size)[2] for r in decodes}
        for r in sorted(decodes, key=lambda r: -widths[r]):
            if groups and (len(groups[-1]) + 1) * widths[groups[-1][0]] * size <= GROUP_SLOTS:
                groups[-1].append(r)
            else:
                groups.append([r])
        return groups

    def _decode_piece(self, group: list[int], cache: PagedCache, window: int | None) -> Piece:
        size, num_heads = cache.block_size, cache.num_kv_heads
        spans = [_span(self._seq_lens[r], 1, window, size) for r in group]
        width = max(span[2] for span in spans)
        low, first, count = (self._column([span[i] for span in spans]) for i in range(3))
        length = self._column([self._seq_lens[r] for r in group])
        # A shorter request repeats its last block up to the group's width; those slots are unused.
        columns = torch.minimum(first + torch.arange(width, device=self._device), first + count - 1)
        requests = torch.tensor(group, device=self._device)
        blocks = self._table.index_select(0, requests).gather(1, columns)
        position = first * size + torch.arange(width * size, device=self._device)
        used = (position >= low) & (position < length)
        used = used[:, None, :].expand(-1, num_heads, -1).reshape(len(group) * num_heads, 1, 1, -1)
        unused = (~used).reshape(-1).nonzero().reshape(-1)
        return Piece(
            rows=torch.tensor([self._starts[r] for r in group], device=self._device),
            pages=self._pages(blocks, num_heads),
            num_requests=len(group),
            slots=slice(None),
            unused=unused if unused.numel() else None,
            visible=used,
        )

    def _chunk_piece(
        self, r: int, first_row: int, count: int, cache: PagedCache, window: int | None
    ) -> Piece:
        size = cache.block_size
        begin = self._seq_lens[r] - self._counts[r] + first_row
        end = begin + count
        low, first_block, width = _span(end, count, window, size)
        blocks = self._table[r : r + 1, first_block : first_block + width]
        row = self._starts[r] + first_row
        visible = None
        if begin > 0 or (window is not None and window < end):
            query = torch.arange(begin, end, device=self._device)[:, None]
            key = torch.arange(low, end, device=self._device)
            visible = key <= query
            if window is not None:
                visible &= key > query - window
        return Piece(
            rows=slice(row, row + count),
            pages=self._pages(blocks, cache.num_kv_heads),
            num_requests=1,
            slots=slice(low - first_block * size, end - first_block * size),
            unused=None,
            visible=visible,
        )

    def _open_piece(self, r: int, first_row: int, count: int, cache: PagedCache) -> Piece:
        """Rows that see all tokens of their request."""
        length, row = self._seq_lens[r], self._starts[r] + first_row
        blocks = self._table[r : r + 1, : -(-length // cache.block_size)]
        return Piece(
            rows=slice(row, row + count),
            pages=self._pages(blocks, cache.num_kv_heads),
            num_requests=1,
            slots=slice(0, length),
            unused=None,
            visible=None,
        )

    def _pages(self, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
        heads = torch.arange(num_heads, device=self._device)
        return (blocks[:, None, :] * num_heads + heads[:, None]).reshape(-1)

    def _column(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def _span(length: int, rows: int, window: int | None, size: int) -> tuple[int, int, int]:
    """What the last `rows` of `length` tokens see: (first position, first block, number of blocks)."""
    low = 0 if window is None else max(0, length - rows - window + 1)
    first = low // size
    return low, first, (length - 1) // size - first + 1
