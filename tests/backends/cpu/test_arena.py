"""An arena's tensors: where they lie, of which pages, and when they go."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from headrace.backends.cpu.arena import ALIGNMENT, HUGE_PAGE, Arena, huge_pages_setting

SIZE = 64 << 20


def mapping_of(address: int) -> dict[str, int]:
    """Return what the system says of the mapping around an address, in bytes or 0 and 1; {}: there is none."""
    facts: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if border := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(border[1], 16) <= address < int(border[2], 16)
        elif inside and (fact := re.match(r"(\w+): +(\d+)( kB)?", line)):
            facts[fact[1]] = int(fact[2]) * (1024 if fact[3] else 1)
    return facts


def written(address: int) -> int:
    """Bytes that the system holds for a mapping, those it has put away to a disk included."""
    facts = mapping_of(address)
    return facts.get("Rss", 0) + facts.get("Swap", 0)


def test_tensors_are_aligned_apart_and_zero():
    arena = Arena(4096)
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.float32), ((2, 2, 2), torch.int8), ((1,), torch.int64)]
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes]
    assert tensors[0].data_ptr() % HUGE_PAGE == 0
    for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert tensor.is_contiguous()
        assert not tensor.any()
    for number, tensor in enumerate(tensors, 1):
        tensor.fill_(number)
    assert (
        [int(tensor.max()) for tensor in tensors] == [int(tensor.min()) for tensor in tensors] == [1, 2, 3, 4]
    )


def test_an_arena_of_the_summed_sizes_just_fits():
    shapes = [((3, 5), torch.bfloat16), ((0, 4), torch.float32), ((17,), torch.float32)]
    arena = Arena(sum(Arena.bytes_for(shape, dtype) for shape, dtype in shapes))
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes]
    assert tensors[1].shape == (0, 4)
    assert arena.bytes_left == 0
    with pytest.raises(ValueError, match=r"\[1\] of torch.float32 takes 4 bytes, the arena has 0 left"):
        arena.empty((1,), torch.float32)


def test_the_last_bytes_can_be_used_where_no_gap_fits():
    arena = Arena(ALIGNMENT + 4)
    arena.empty((1,), torch.float32)
    arena.empty((1,), torch.float32).fill_(1)
    assert arena.bytes_left == 0


def test_an_empty_arena_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        Arena(0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_when_written_and_goes_with_the_last_tensor():
    arena = Arena(SIZE)
    first, second = (arena.empty((SIZE // 2,), torch.int8) for _ in range(2))
    address = second.data_ptr()
    assert written(address) < SIZE // 4
    first.fill_(1)
    second.fill_(1)
    assert written(address) >= SIZE
    del arena, first
    gc.collect()
    assert int(second.sum()) == SIZE // 2
    view = second[5:]
    del second
    assert int(view[-1]) == 1
    del view
    gc.collect()
    assert written(address) < SIZE


@pytest.mark.skipif(
    huge_pages_setting() not in ("always", "madvise"), reason="this system has no transparent huge pages"
)
def test_pages_are_large():
    arena = Arena(SIZE)
    assert arena.marked
    tensor = arena.empty((SIZE,), torch.int8).fill_(1)
    facts = mapping_of(tensor.data_ptr())
    # How many of them are large when memory is in pieces is the system's affair; that they may be is the arena's.
    assert facts["THPeligible"] == 1


@pytest.mark.parametrize(
    ("text", "setting"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never", "always"), ("", "unknown")],
)
def test_the_systems_setting(tmp_path, text, setting):
    (tmp_path / "enabled").write_text(text)
    assert huge_pages_setting(tmp_path / "enabled") == setting
    assert huge_pages_setting(tmp_path / "none") == "unknown"
