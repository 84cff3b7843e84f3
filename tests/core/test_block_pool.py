"""The block pool against a model made of plain lists."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.core.errors import EngineError
from headrace.core.kv.block_pool import BlockPool

FUZZ = int(os.environ.get("HEADRACE_FUZZ", "1"))
SIZE = 7


class PoolMachine(RuleBasedStateMachine):
    """The model: `free` is a plain list in LRU order, `refs` and `keys` are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.free = list(range(1, SIZE + 1))
        self.refs: dict[int, int] = {}
        self.keys: dict[int, tuple[int, bytes]] = {}

    @rule(count=st.integers(1, SIZE))
    def take(self, count: int) -> None:
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count) == expected
        for block in expected:
            self.refs[block] = 1
            self.keys.pop(block, None)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), group=st.integers(0, 1), content=st.integers(0, 9))
    def publish(self, data: st.DataObject, group: int, content: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        key = (group, bytes([content]))
        self.pool.publish(*key, block)
        if block not in self.keys and key not in self.keys.values():
            self.keys[block] = key

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        assert self.pool.lookup(*self.keys[block]) == block
        self.pool.hold(block)
        if block not in self.refs:
            self.free.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.drop([block])
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]
            # Nothing worth finding: the next to be taken. Otherwise the last.
            self.free.insert(len(self.free) if block in self.keys else 0, block)

    @rule(block=st.integers(1, SIZE))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.keys.pop(block, None)

    @invariant()
    def agrees(self) -> None:
        assert list(self.pool._free) == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_cached == len(self.keys)
        self.pool.check([block for block, count in self.refs.items() for _ in range(count)])


def test_block_pool_stateful() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=200 * FUZZ, stateful_step_count=50, derandomize=True, deadline=None),
    )


def test_dropping_a_block_too_often_is_an_error() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.drop([block])
    with pytest.raises(EngineError, match="freed more often"):
        pool.drop([block])


def test_the_integrity_check_finds_a_leak_and_a_second_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.check(blocks)
    with pytest.raises(EngineError, match="accounting is off"):
        pool.check(blocks[:1])
    with pytest.raises(EngineError, match="accounting is off"):
        pool.check([*blocks, blocks[0]])
