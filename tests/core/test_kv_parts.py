"""Layouts, hashes and the pool's size."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.core.errors import ConfigError
from headrace.core.interfaces import KVCacheSpec
from headrace.core.kv.hashing import block_hash
from headrace.core.kv.layout import blocks_needed, layout_for
from headrace.core.kv.sizing import PoolRequest, size_pool
from headrace.core.request import BlockKey


def specs(*windows: int | None) -> dict[str, KVCacheSpec]:
    return {f"layer{i}": KVCacheSpec(1, 64, "float32", 512, window) for i, window in enumerate(windows)}


def pages(*windows: int | None) -> dict[str, int]:
    return {f"layer{i}": 512 * 16 for i in range(len(windows))}


def test_layers_of_one_kind_are_one_group() -> None:
    layout = layout_for(specs(*[None] * 30), pages(*[None] * 30), 16)
    assert len(layout.groups) == 1
    assert layout.num_slots == 30
    assert layout.page_bytes == 30 * 512 * 16


def test_groups_have_as_many_layers_as_the_rarest_window() -> None:
    windows = [512 if i % 6 else None for i in range(18)]
    layout = layout_for(specs(*windows), pages(*windows), 16)
    assert [(group.window, len(group.layers)) for group in layout.groups] == [(None, 3)] + [(512, 3)] * 5
    assert layout.num_slots == 3
    names = [name for group in layout.groups for name in group.layers]
    assert sorted(names) == sorted(specs(*windows))


def test_a_window_group_needs_no_more_than_its_window_shows() -> None:
    layout = layout_for(specs(None, 64), pages(None, 64), 16)
    assert blocks_needed(layout, 1000, 32) == 63 + 7
    assert blocks_needed(layout, 10, 32) == 2


def test_layers_that_cannot_share_memory_lie_beside_each_other() -> None:
    # Two window groups and a full one of three slots; the full layers are a proposer's.
    windows = [64] * 6 + [None] * 3
    storage = {f"layer{i}": i < 6 for i in range(9)}
    sizes = {f"layer{i}": 8192 if i < 6 else 1024 for i in range(9)}
    shared = layout_for(specs(*windows), sizes, 16)
    apart = layout_for(specs(*windows), sizes, 16, storage)
    assert apart.groups == shared.groups
    assert shared.page_bytes == 3 * 8192
    assert apart.page_bytes == 3 * (8192 + 1024)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention layer"):
        layout_for({}, {}, 16)


def test_hashes_depend_on_tokens_parent_and_keys_that_meet_the_block() -> None:
    base = block_hash(b"", [1, 2, 3, 4], [], 0)
    assert len(base) == 32
    assert block_hash(b"", [1, 2, 3, 5], [], 0) != base
    assert block_hash(base, [1, 2, 3, 4], [], 4) != base
    assert block_hash(b"", [1, 2, 3, 4], [BlockKey(4, 8, b"x")], 0) == base
    assert block_hash(b"", [1, 2, 3, 4], [BlockKey(3, 8, b"x")], 0) != base
    assert block_hash(b"", [1, 2, 3, 4], [BlockKey(0, None, b"x")], 0) != base
    assert block_hash(b"", [1, 2, 3, 4], [BlockKey(0, None, b"y")], 0) != block_hash(
        b"", [1, 2, 3, 4], [BlockKey(0, None, b"x")], 0
    )


def test_hashes_are_equal_in_every_process() -> None:
    code = "from headrace.core.kv.hashing import block_hash; print(block_hash(b'p', [1, 2], [], 0).hex())"
    out = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert out == {block_hash(b"p", [1, 2], [], 0).hex()}


def ask(**changes: object) -> PoolRequest:
    layout = layout_for(specs(None), pages(None), 16)  # 8 KiB a page
    known: dict[str, object] = {
        "layout": layout,
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "max_model_len_is_given": False,
        "max_tokens_in_flight": 512,
        "available_bytes": 2**30,
    }
    return PoolRequest(**(known | changes))  # type: ignore[arg-type]


def test_the_default_pool_is_the_smallest_of_three() -> None:
    assert size_pool(ask()).num_blocks == 4 * 128
    assert size_pool(ask(max_num_seqs=10**6, available_bytes=2**40)).num_blocks == 2 * 2**30 // 8192
    assert size_pool(ask(max_num_seqs=10**6)).num_blocks == 2**28 // 8192


def test_a_default_length_is_lowered_with_a_note_and_a_given_one_is_refused() -> None:
    """Source: vllm-project/vllm#2418."""
    budget = 600 // 16 * 8192
    size = size_pool(ask(kv_cache_memory=budget))
    assert size.max_model_len == 592
    assert "max_model_len lowered to 592" in size.notes[0]
    with pytest.raises(ConfigError) as caught:
        size_pool(ask(kv_cache_memory=budget, max_model_len_is_given=True))
    for part in ("2048 tokens needs 1.0 MiB", "128 blocks", "0.3 MiB", "kv_cache_memory", "at most 592"):
        assert part in str(caught.value)


def test_more_than_there_is_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory asks for 2\.00 GiB .* 1\.00 GiB of memory are available"
    ):
        size_pool(ask(kv_cache_memory=2 * 2**30))
    with pytest.raises(ConfigError, match="num_kv_blocks asks"):
        size_pool(ask(num_kv_blocks=10**6))
