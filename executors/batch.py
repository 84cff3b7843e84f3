"""What a worker keeps of its requests: persistent arrays, one row each, updated in place by plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.errors import EngineError
from headrace.core.interfaces import AttentionBatch
from headrace.core.plan import Continued, NewRequest
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash

__all__ = ["PersistentBatch", "Places", "RowState", "StepInputs", "attention_batches"]


@dataclass
class RowState:
    """One request on the worker."""

    request_id: str
    row: int
    params: SamplingParams
    stash: Stash
    num_prompt_tokens: int
    num_tokens: int
    """Confirmed, sampled ones included."""
    num_computed: int
    num_blocks: list[int]
    drafts: list[int] = field(default_factory=list)


@dataclass
class StepInputs:
    """A step's tensors; R requests, N tokens, in the order of the entries."""

    states: list[RowState]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    query_start: NDArray[np.int32]
    """[R + 1]."""
    ids: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64."""
    groups: list[AttentionBatch]


class PersistentBatch:
    """Token ids [rows, max_model_len + 1] and, a KV group, block tables [rows, max_blocks].

    The arrays are allocated whole and touched where they are used. Rows are reused; more are made when requests
    that were parked keep theirs.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self._max_len = max_model_len + 1
        self._block_size = block_size
        self._max_blocks = -(-self._max_len // block_size) + 1
        self._tokens = np.zeros((num_rows, self._max_len), dtype=np.int64)
        self._tables = [np.zeros((num_rows, self._max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._free = list(range(num_rows))[::-1]
        self._states: dict[str, RowState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: str) -> RowState:
        return self._states[request_id]

    @property
    def request_ids(self) -> list[str]:
        """Requests this worker knows."""
        return list(self._states)

    def tokens(self, state: RowState, end: int) -> NDArray[np.int64]:
        """Return ids [0, end) of a request: a view, to be read."""
        return self._tokens[state.row, :end]

    def block_ids(self, state: RowState) -> tuple[Sequence[int], ...]:
        """Return a request's blocks by KV group: views, to be read."""
        tables: Sequence[Any] = self._tables
        return tuple(table[state.row, :count] for table, count in zip(tables, state.num_blocks, strict=True))

    # Plans change rows -------------------------------------------------------------------------------

    def add(self, new: NewRequest) -> RowState:
        """Take in a request this worker does not know."""
        if new.request_id in self._states:
            raise EngineError(f"the plan adds request {new.request_id!r}, which this worker knows already")
        if not self._free:
            self._grow()
        row = self._free.pop()
        count = len(new.token_ids)
        self._tokens[row, :count] = new.token_ids
        state = RowState(
            new.request_id,
            row,
            new.params,
            new.stash,
            new.num_prompt_tokens,
            count,
            new.start,
            [0] * len(self._tables),
        )
        self._states[new.request_id] = state
        self._append_blocks(state, new.block_ids)
        return state

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        state = self._states.pop(request_id, None)
        if state is None:
            raise EngineError(f"the plan removes request {request_id!r}, which this worker does not know")
        self._free.append(state.row)

    def advance(self, entry: Continued) -> RowState:
        """Take in what changed for a known request."""
        state = self._states.get(entry.request_id)
        if state is None:
            raise EngineError(
                f"the plan continues request {entry.request_id!r}, which this worker does not know"
            )
        if entry.new_token_ids:
            end = state.num_tokens + len(entry.new_token_ids)
            self._tokens[state.row, state.num_tokens : end] = entry.new_token_ids
            state.num_tokens = end
        if entry.new_block_ids:
            self._append_blocks(state, entry.new_block_ids)
        return state

    def confirm(
        self, state: RowState, tokens: Sequence[int], num_computed: int, drafts: Sequence[int]
    ) -> None:
        """Take in what a step decided: new ids, how far KV is valid, and drafts behind them."""
        end = state.num_tokens + len(tokens)
        self._tokens[state.row, state.num_tokens : end] = tokens
        state.num_tokens = end
        state.num_computed = num_computed
        state.drafts = list(drafts[: self._max_len - end])
        if state.drafts:
            self._tokens[state.row, end : end + len(state.drafts)] = state.drafts

    def _append_blocks(self, state: RowState, block_ids: Sequence[Sequence[int]]) -> None:
        for group, ids in enumerate(block_ids):
            first = state.num_blocks[group]
            self._tables[group][state.row, first : first + len(ids)] = ids
            state.num_blocks[group] = first + len(ids)

    def _grow(self) -> None:
        rows = self._tokens.shape[0]
        self._free = list(range(rows, 2 * rows))[::-1]
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tables = [np.concatenate([table, np.zeros_like(table)]) for table in self._tables]

    # Rows become a step ------------------------------------------------------------------------------

    def inputs(self, states: list[RowState], starts: list[int], counts: list[int], device: str) -> StepInputs:
        """Gather the tensors of a step; no Python a token."""
        rows = np.array([state.row for state in states], dtype=np.int64)
        start, count = np.array(starts, dtype=np.int64), np.array(counts, dtype=np.int64)
        num_blocks = -(-int((start + count).max()) // self._block_size)
        tables = [table[rows, :num_blocks] for table in self._tables]
        places, groups = attention_batches(tables, start, count, self._block_size, device)
        ids = torch.from_numpy(self._tokens[rows[places.requests], places.positions]).to(device)
        positions = torch.from_numpy(places.positions).to(device)
        return StepInputs(states, start, count, places.query_start, ids, positions, groups)


class Places(NamedTuple):
    """Where the tokens of a step stand."""

    positions: NDArray[np.int64]
    """[N], each in its request."""
    requests: NDArray[np.int64]
    """[N], which of the R it is of."""
    query_start: NDArray[np.int32]
    """[R + 1], where a request's tokens begin among the N."""


def attention_batches(
    tables: Sequence[NDArray[np.int32]],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    block_size: int,
    device: str,
) -> tuple[Places, list[AttentionBatch]]:
    """Describe the tokens [start, start + count) of R requests to attention backends; no Python a token.

    tables: a KV group: [R, blocks], as many as the longest request reaches.
    """
    query_start = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    requests = np.repeat(np.arange(len(starts)), counts)
    # Token n of request r stands at start[r] + n - query_start[r].
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[requests]
    lengths = (starts + counts).astype(np.int32)
    seq_lens = torch.from_numpy(lengths)
    device_positions = torch.from_numpy(positions).to(device)
    blocks, offsets = np.divmod(positions, block_size)
    longest_query, longest = int(counts.max()), int(lengths.max())
    groups = [
        AttentionBatch(
            query_start=torch.from_numpy(query_start),
            seq_lens=seq_lens,
            positions=device_positions,
            block_table=torch.from_numpy(table).to(device),
            slot_mapping=torch.from_numpy(table[requests, blocks].astype(np.int64) * block_size + offsets).to(
                device
            ),
            max_query_len=longest_query,
            max_seq_len=longest,
        )
        for table in tables
    ]
    return Places(positions, requests, query_start), groups
