"""The torch reference attention, through the kit that other backends are proved with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.backends.torch_reference.attention import TorchAttention
from headrace.backends.torch_reference.paging import CHUNK_ROWS, GROUP_SLOTS
from headrace.core.interfaces import AttentionBackend, AttentionSpec
from headrace.testing import AttentionBackendSuite, Chunk, PagedRun
from headrace.testing.compare import check_close


class TestTorchAttention(AttentionBackendSuite):
    def make(self) -> AttentionBackend:
        return TorchAttention()


def spec(**changes: Any) -> AttentionSpec:
    base = AttentionSpec(4, 2, 64, "float32", "float32", 16)
    return replace(base, **changes)


def test_says_why_not() -> None:
    backend = TorchAttention()
    assert backend.why_not(spec(), "cpu") == []
    reasons = backend.why_not(spec(dtype="int7", kv_dtype="fp3", num_heads=5), "abacus")
    assert len(reasons) == 4
    assert all(word in " ".join(reasons) for word in ("abacus", "int7", "fp3", "5 heads"))


def test_a_page_holds_keys_and_values() -> None:
    cache = TorchAttention().allocate(spec(kv_dtype="bfloat16"), 5, "cpu")
    page = TorchAttention().layout(spec(kv_dtype="bfloat16")).page_bytes
    assert page == 2 * 16 * 2 * 64 * 2
    assert cache.k.nbytes + cache.v.nbytes == 5 * page


@pytest.mark.parametrize("features", [{}, {"window": 40}, {"soft_cap": 3.0}])
def test_long_prefills_are_cut_without_a_seam(features: dict[str, Any]) -> None:
    length = 2 * CHUNK_ROWS + 5
    run = PagedRun(TorchAttention(), spec(**features), (length,), seed=1)
    batch = run.batch([Chunk(0, 0, length)])
    assert len(TorchAttention().prepare(run.group, batch).pieces(run.cache, run.spec.window)) == 3
    out = run.step([Chunk(0, 0, length)])[0][0]
    for begin in (0, CHUNK_ROWS - 2, length - 4):
        part = Chunk(0, begin, begin + 4)
        check_close(out[begin : begin + 4], run.expected(part)[0], 1e-4, f"rows from {begin}")


def test_decodes_are_grouped_by_length() -> None:
    lengths = [GROUP_SLOTS, 40, 16, 17, 30, 2]
    run = PagedRun(TorchAttention(), spec(), lengths, seed=2)
    chunks = [Chunk(s, n - 1, n) for s, n in enumerate(lengths)]
    pieces = TorchAttention().prepare(run.group, run.batch(chunks)).pieces(run.cache, None)
    assert [piece.num_requests for piece in pieces] == [1, 5]


def test_a_wider_cache_than_the_model() -> None:
    run = PagedRun(TorchAttention(), spec(dtype="bfloat16"), (40,), seed=3)
    assert run.cache.k.dtype == torch.float32
    for chunk in (Chunk(0, 0, 39), Chunk(0, 39, 40)):
        run.check([chunk], run.step([chunk]), "bfloat16 over a float32 cache")
