"""The forward pass of a worker: as it is, or recorded once and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from headrace.core.config import EngineConfig
from headrace.core.interfaces import AttentionBatch, Graph, GraphRecorder, LinearWrapper, Model, RecordError
from headrace.executors.context import KVMemory, StepContext
from headrace.executors.loading import LoadedModel

__all__ = ["EagerForward", "Forward", "RecordedForward", "SwitchedForward", "best_forward", "record_forward"]

Hidden = tuple[torch.Tensor, Mapping[int, torch.Tensor]]


class Forward(Protocol):
    """Runs the model's layers over a step."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> Hidden:
        """X [N, C], positions [N], a batch for each KV group -> what `Model.forward` returns."""
        ...


class EagerForward:
    """Calls the model."""

    def __init__(self, model: Model, memory: KVMemory) -> None:
        self._model = model
        self._memory = memory

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> Hidden:
        """See `Forward`."""
        return self._model.forward(x, positions, self._memory.step(batches))


class RecordedForward:
    """Replays a recording over inputs that are copied to where it reads them."""

    def __init__(
        self,
        graph: Graph,
        memory: KVMemory,
        context: StepContext,
        inputs: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
    ) -> None:
        self._graph = graph
        self._memory = memory
        self._context = context
        self._x, self._positions = inputs
        self._hidden = hidden

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> Hidden:
        """See `Forward`. The hidden states are overwritten by the next step."""
        count = x.shape[0]
        self._x[:count].copy_(x)
        self._positions[:count].copy_(positions)
        self._memory.step(batches, into=self._context)
        self._graph.replay(count)
        return self._hidden[:count], {}


class SwitchedForward:
    """Two recordings of one model: with what stands around its products at rest, and with it at work."""

    def __init__(self, plain: Forward, wrapped: Forward, wrappers: Sequence[LinearWrapper]) -> None:
        self._plain = plain
        self._wrapped = wrapped
        self._wrappers = wrappers

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, batches: Sequence[AttentionBatch]) -> Hidden:
        """See `Forward`."""
        at_work = any(wrapper.active for wrapper in self._wrappers)
        return (self._wrapped if at_work else self._plain)(x, positions, batches)


@torch.inference_mode()
def best_forward(loaded: LoadedModel, memory: KVMemory, config: EngineConfig) -> Forward:
    """Record the forward pass where that can be done, and note in the report what runs."""
    try:
        if config.enforce_eager:
            raise RecordError("enforce_eager is set")
        if loaded.recorder is None:
            raise RecordError(f"attention {loaded.backend.name} and these ops are not recorded")
        forward = _record(loaded, loaded.recorder, memory, config)
    except RecordError as reason:
        loaded.report["graph"] = f"no: {reason}"
        return EagerForward(loaded.model, memory)
    loaded.report["graph"] = "yes"
    return forward


def _record(loaded: LoadedModel, recorder: GraphRecorder, memory: KVMemory, config: EngineConfig) -> Forward:
    def record(at_work: bool) -> Forward:
        for wrapper in loaded.wrappers:
            wrapper.active = at_work
        try:
            return record_forward(
                recorder,
                loaded.model,
                memory,
                max_rows=config.scheduler.max_num_batched_tokens,
                block_size=config.cache.block_size,
                device=loaded.device,
            )
        finally:
            for wrapper in loaded.wrappers:
                wrapper.active = False

    plain = record(False)
    return SwitchedForward(plain, record(True), loaded.wrappers) if loaded.wrappers else plain


def record_forward(
    recorder: GraphRecorder, model: Model, memory: KVMemory, *, max_rows: int, block_size: int, device: str
) -> RecordedForward:
    """Record the model's layers for steps of up to `max_rows` tokens.

    The recording is tried on a few tokens against the model itself; KV goes to the null block, which nobody reads.
    Raises `RecordError` with the reason.
    """
    ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
    x, positions = model.embed(ids).contiguous(), torch.zeros_like(ids)
    few = min(3, max_rows, block_size)
    batches = [_null_batch(few, device) for _ in range(memory.num_groups)]
    context = memory.step(batches)
    graph, (hidden, taps) = recorder.record(lambda: model.forward(x, positions, context), max_rows)
    if taps:
        raise RecordError(f"hidden states of layers {sorted(taps)} are asked for")
    recorded = RecordedForward(graph, memory, context, (x, positions), hidden)
    trial = model.embed(torch.arange(few, device=device)), torch.arange(few, device=device)
    right, _ = model.forward(*trial, memory.step(batches))
    got, _ = recorded(*trial, batches)
    if not torch.equal(got, right):
        raise RecordError("replayed, it gives other numbers than the model: something in it was not recorded")
    return recorded


def _null_batch(count: int, device: str) -> AttentionBatch:
    """The first tokens of one request in the null block."""
    return AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        positions=torch.arange(count, device=device),
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.arange(count, device=device),
        max_query_len=count,
        max_seq_len=count,
    )
