"""KV memory that is taken before it is written to: when, how much, and that nothing changes in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headrace.backends.cpu.ahead import PagesAhead
from headrace.backends.cpu.arena import HUGE_PAGE, Arena
from headrace.backends.cpu.attention import CpuAttention
from headrace.backends.cpu.native import open_kernels, require
from headrace.core.interfaces.attention import AttentionBatch, AttentionSpec
from headrace.core.interfaces.kv_cache import KVCacheGroup

KIB = 1024


def cache(blocks: int, block_bytes: int) -> torch.Tensor:
    shape = (blocks, block_bytes)
    return Arena(Arena.bytes_for(shape, torch.uint8)).empty(shape, torch.uint8)


class Taken:
    """Notes what is taken, by cache and page."""

    def __init__(self, caches: Sequence[torch.Tensor], at_once: int) -> None:
        self._caches = caches
        self.pages: list[tuple[int, int]] = []
        self.ahead = PagesAhead(self._touch, at_once)
        for one in caches:
            self.ahead.add(one)

    def _touch(self, addresses: ctypes.Array[ctypes.c_void_p], count: int, num_bytes: int) -> None:
        assert num_bytes == HUGE_PAGE
        assert len(addresses) == count > 0
        for address in addresses:
            for index, one in enumerate(self._caches):
                if 0 <= address - one.data_ptr() < one.nbytes:
                    self.pages.append((index, (address - one.data_ptr()) // HUGE_PAGE))

    def by(self, block: int) -> list[tuple[int, int]]:
        self.pages = []
        self.ahead.reach(block)
        return self.pages


def test_what_is_needed_is_taken_at_once_and_a_little_of_what_comes() -> None:
    # A page holds 4 blocks of either cache.
    taken = Taken([cache(20, 512 * KIB), cache(20, 512 * KIB)], at_once=3)
    first, second = taken.by(0), taken.by(0)
    assert sorted(first[:2]) == [(0, 0), (1, 0)]  # what block 0 needs, and one page of what block 4 will
    assert sorted(first[2:] + second) == [(0, 1), (1, 1)]
    assert taken.by(0) == taken.by(3) == []
    assert sorted(taken.by(4)) == [(0, 2), (1, 2)]
    assert sorted(taken.by(17)) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert taken.by(19) == []  # there is no more


def test_blocks_of_several_sizes_have_their_memory_in_time() -> None:
    blocks_a_page = (16, 4)
    taken = Taken([cache(64, 128 * KIB), cache(64, 512 * KIB)], at_once=1)
    seen: set[tuple[int, int]] = set()
    for block in range(64):
        pages = taken.by(block)
        assert not seen.intersection(pages)
        seen.update(pages)
        assert seen >= {(i, block // count) for i, count in enumerate(blocks_a_page)}
        assert all(page * blocks_a_page[i] <= block + 16 for i, page in pages), "too early"
    assert len(seen) == 64 // 16 + 64 // 4


def rss_of(pages: torch.Tensor) -> int:
    """Bytes of a tensor's memory that the system has given."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < pages.data_ptr() + pages.nbytes and pages.data_ptr() < high
        elif inside and head == "Rss:":
            total += int(line.split()[1]) * KIB
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system tells nothing of mappings")
def test_memory_is_taken_and_what_lies_there_stays() -> None:
    kernels = require(open_kernels())
    pages = cache(64, 128 * KIB)
    pages[3] = torch.arange(128 * KIB).remainder(251).to(torch.uint8)
    before, had = pages[3].clone(), rss_of(pages)
    ahead = PagesAhead(kernels.touch, at_once=2)
    ahead.add(pages)
    ahead.reach(40)
    assert rss_of(pages) - had >= 2 * HUGE_PAGE
    assert torch.equal(pages[3], before)
    assert not pages[:3].any()
    assert not pages[4:].any()


def test_a_step_takes_what_its_blocks_need() -> None:
    backend = CpuAttention()
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=2, head_dim=64, dtype="float32", kv_dtype="float32", block_size=16
    )
    taken = 0

    def touch(addresses: ctypes.Array[ctypes.c_void_p], count: int, num_bytes: int) -> None:
        nonlocal taken
        taken += count

    backend._ahead._touch = touch
    for _ in range(3):
        backend.allocate(spec, 1000, "cpu")
    backend.prepare(KVCacheGroup(None, ("a", "b", "c")), batch([[5, 900, 7]]))
    assert taken == 3 * 7  # blocks of 16 KiB, and 1,000 of them fill so many pages


def batch(table: list[list[int]]) -> AttentionBatch:
    count = len(table)
    return AttentionBatch(
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.ones(count, dtype=torch.int32),
        positions=torch.zeros(count, dtype=torch.int64),
        block_table=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        max_query_len=1,
        max_seq_len=1,
    )
