"""Stand-ins that let a scheduler, a KV cache manager or a constraint be tested in milliseconds, without torch.

`FakeExecutor` is a strict worker over simulated KV memory: each cell remembers which token of which position was
written there, and every read is checked. A block with two writers, a prefix hit on something never computed, a
worker whose state drifts or a block granted before its fence has passed ends in an `AssertionError` that says so.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.interfaces.kv_cache import KVCacheGroup, KVCacheLayout
from headrace.core.plan import Continued, NewRequest, RequestResult, StepPlan, StepResult
from headrace.core.sampling_params import SamplingParams

__all__ = ["FakeExecutor", "FakeProposer", "fake_layout", "fake_next_token"]

Proposal = Callable[[Sequence[int], int], Sequence[int]]


def fake_layout(*windows: int | None, block_size: int = 4) -> KVCacheLayout:
    """Return a layout with one group a window; by default one full group."""
    groups = tuple(
        KVCacheGroup(window, (f"layer{index}",)) for index, window in enumerate(windows or (None,))
    )
    return KVCacheLayout(block_size, groups, 1, 1)


def fake_next_token(tokens: Sequence[int], vocab_size: int = 1000) -> int:
    """The fake model: the next token as a function of all tokens before it."""
    return zlib.crc32(array("q", tokens).tobytes()) % vocab_size


class FakeProposer:
    """Drafts the fake model's own next tokens, with every `wrong_every`-th one wrong."""

    def __init__(self, count: int, wrong_every: int = 3, vocab_size: int = 1000) -> None:
        self._count, self._wrong_every, self._vocab_size = count, wrong_every, vocab_size

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return `count` drafts behind `tokens`."""
        guess = list(tokens)
        for _ in range(self._count):
            right = fake_next_token(guess, self._vocab_size)
            guess.append((right + 1) % self._vocab_size if len(guess) % self._wrong_every == 0 else right)
        return guess[len(tokens) :]


@dataclass
class _WorkerState:
    """What a worker keeps for a request."""

    tokens: list[int]
    params: SamplingParams
    num_computed: int
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)


@dataclass
class _Handle:
    """A step that runs when its result is asked for."""

    run: Callable[[], StepResult]

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.run()


class FakeExecutor:
    """An `Executor` with the fake model. Steps run in order, when their result is taken.

    lose: (request id, step) -> True makes the worker report that it lost the last half of its KV.
    raise_at: steps that raise `RuntimeError` when they are done.
    interrupt_at: steps that raise `KeyboardInterrupt` in the middle, once each.
    checked: False skips the simulated memory, for benchmarks.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        max_in_flight: int = 1,
        runs_ahead: bool = False,
        proposer: FakeProposer | None = None,
        vocab_size: int = 1000,
        lose: Callable[[str, int], bool] | None = None,
        raise_at: frozenset[int] = frozenset(),
        interrupt_at: frozenset[int] = frozenset(),
        checked: bool = True,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.runs_ahead = runs_ahead
        self.kv_layout = layout
        self.lookahead = 0
        self.plans: list[StepPlan] = []
        """Every plan submitted, oldest first."""
        self.num_verified_drafts = 0
        self.num_accepted_drafts = 0
        self.num_skipped = 0
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._lose = lose
        self._raise_at = raise_at
        self._interrupt_at = interrupt_at
        self._checked = checked
        self._states: dict[str, _WorkerState] = {}
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._written: deque[dict[int, str]] = deque()
        self._sent_tables: dict[str, list[list[int]]] = {}

    # The executor's contract -------------------------------------------------------------------------

    def start(self) -> None:
        """Nothing to build."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Nothing to allocate."""

    def submit(self, plan: StepPlan) -> _Handle:
        """Queue a plan."""
        if len(self._in_flight) >= self.max_in_flight:
            raise AssertionError(f"{len(self._in_flight)} plans are in flight, {self.max_in_flight} may be")
        if self._checked:
            self._check_fence(plan)
            self.plans.append(plan)
        self._in_flight.append(plan)
        return _Handle(lambda: self._run(plan))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of this object."""
        return [getattr(self, method)(*args, **kwargs)]

    def reset(self) -> None:
        """Forget every request and every plan in flight; memory stays."""
        self._states.clear()
        self._in_flight.clear()
        self._written.clear()
        self._sent_tables.clear()

    def call_plugin(self, plugin: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """There are no plugins here."""
        return []

    def health(self) -> None:
        """Always well."""

    def report(self) -> Mapping[str, Any]:
        """Nothing to report."""
        return {}

    def metrics(self) -> Mapping[str, float]:
        """No figures."""
        return {}

    def shutdown(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._cells.clear()

    @property
    def known_requests(self) -> set[str]:
        """Requests this worker keeps state for."""
        return set(self._states)

    # The worker --------------------------------------------------------------------------------------

    def _check_fence(self, plan: StepPlan) -> None:
        """Blocks granted in `plan` are not written by another request's entry in a plan still in flight."""
        writers = {block: name for written in self._written for block, name in written.items()}
        size, written_now = self.kv_layout.block_size, {}
        for name in plan.removed:
            self._sent_tables.pop(name, None)
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        for entry in entries:
            name, end = entry.request_id, entry.start + entry.count
            if isinstance(entry, NewRequest):
                self._sent_tables[name] = [list(table) for table in entry.block_ids]
                granted = [b for table in entry.block_ids for b in table[entry.start // size :]]
            else:
                for table, new in zip(self._sent_tables[name], entry.new_block_ids, strict=False):
                    table.extend(new)
                granted = [block for table in entry.new_block_ids for block in table]
            for block in granted:
                if writers.get(block, name) != name:
                    raise AssertionError(
                        f"step {plan.step} grants block {block} to {name} while a plan in flight writes it for "
                        f"{writers[block]}"
                    )
            for table in self._sent_tables[name]:
                written_now.update(dict.fromkeys(table[entry.start // size : -(-end // size)], name))
        self._written.append(written_now)

    def _run(self, plan: StepPlan) -> StepResult:
        first = self._in_flight.popleft()
        if self._checked:
            self._written.popleft()
        if first is not plan:
            raise AssertionError(f"result of step {plan.step} was taken before that of step {first.step}")
        for name in plan.removed:
            if name not in self._states:
                raise AssertionError(f"step {plan.step} removes {name}, which this worker does not know")
            del self._states[name]
        results: dict[str, RequestResult] = {}
        for new in plan.new:
            if new.request_id in self._states:
                raise AssertionError(f"step {plan.step} adds {new.request_id}, which this worker knows")
            self._states[new.request_id] = _WorkerState(
                list(new.token_ids), new.params, new.start, [list(table) for table in new.block_ids]
            )
            results[new.request_id] = self._advance(new.request_id, new.start, new.count, 0, plan.step)
        if plan.step in self._interrupt_at:
            raise KeyboardInterrupt
        for old in plan.continued:
            results[old.request_id] = self._continue(old, plan.step)
        if plan.step in self._raise_at:
            raise RuntimeError(f"step {plan.step} was told to fail")
        return StepResult(step=plan.step, requests=results)

    def _continue(self, entry: Continued, step: int) -> RequestResult:
        state = self._states[entry.request_id]
        for table, new in zip(state.tables, entry.new_block_ids, strict=False):  # none: no group grew
            table.extend(new)
        state.tokens.extend(entry.new_token_ids)
        if entry.start > state.num_computed:
            self.num_skipped += 1
            return RequestResult(num_computed=state.num_computed)
        return self._advance(entry.request_id, entry.start, entry.count, entry.num_drafts, step)

    def _advance(self, name: str, start: int, count: int, num_drafts: int, step: int) -> RequestResult:
        state = self._states[name]
        if start != state.num_computed:
            raise AssertionError(f"{name} drifted: plan starts at {start}, computed is {state.num_computed}")
        confirmed = len(state.tokens)
        tokens = state.tokens + state.drafts[:num_drafts]
        state.drafts = []
        end = start + count
        if end > len(tokens):
            raise AssertionError(f"{name}: the plan reaches {end}, only {len(tokens)} tokens are known")
        if self._checked:
            self._write(state, tokens, start, end)
            self._read(name, state, tokens, end)
        if self._lose is not None and self._lose(name, step):
            state.num_computed = min(end // 2, confirmed - 1)
            return RequestResult(num_computed=state.num_computed)
        accepted: list[int] = []
        if end >= confirmed and state.params.max_tokens != 0:
            accepted = self._verify(tokens, confirmed, end)
        state.num_computed = min(end, confirmed + max(0, len(accepted) - 1))
        state.tokens.extend(accepted)
        if accepted and self._proposer is not None:
            state.drafts = self._proposer(state.tokens)
        return RequestResult(
            tokens=accepted, num_computed=state.num_computed, drafts=list(state.drafts) if accepted else []
        )

    def _verify(self, tokens: list[int], confirmed: int, end: int) -> list[int]:
        """Draw behind the last confirmed token, and behind each draft as long as drafts are what was drawn."""
        accepted: list[int] = []
        for position in range(confirmed, end + 1):
            token = fake_next_token(tokens[:position], self._vocab_size)
            accepted.append(token)
            if position < end:
                self.num_verified_drafts += 1
                if tokens[position] != token:
                    break
                self.num_accepted_drafts += 1
        return accepted

    # Simulated memory --------------------------------------------------------------------------------

    def _cell(self, table: list[int], position: int) -> tuple[int, int]:
        size = self.kv_layout.block_size
        block = table[position // size]
        if block == 0:
            raise AssertionError(f"position {position} lies in the null block")
        return block, position % size

    def _write(self, state: _WorkerState, tokens: list[int], start: int, end: int) -> None:
        for table in state.tables:
            for position in range(start, end):
                self._cells[self._cell(table, position)] = (position, tokens[position])

    def _read(self, name: str, state: _WorkerState, tokens: list[int], end: int) -> None:
        for group, table in zip(self.kv_layout.groups, state.tables, strict=True):
            first = 0 if group.window is None else max(0, state.num_computed - group.window + 1)
            for position in range(first, end):
                cell = self._cell(table, position)
                found = self._cells.get(cell)
                if found != (position, tokens[position]):
                    raise AssertionError(
                        f"{name} reads {found} in block {cell[0]} where position {position} with token "
                        f"{tokens[position]} belongs"
                    )
