"""A second model drafts: a smaller one of the same vocabulary, with KV of its own in the blocks of the first.

Its KV follows the confirmed ids: what it computed of drafts that were rejected is computed again from the first id
that differs. It draws as the model will, with the request's parameters and the same noise, so a draft is right
wherever both models' distributions lead the noise to one token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core.interfaces import (
    BatchRow,
    DraftDistribution,
    KVCacheLayout,
    KVCacheSpec,
    LogitsRow,
    Proposer,
    RunnerBatch,
)
from headrace.core.interfaces.build import ExecutorBuild, WorkerContext
from headrace.core.plan import NewRequest, StepResult
from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash
from headrace.executors.batch import attention_batches
from headrace.executors.context import KVMemory
from headrace.executors.graphs import Forward, best_forward
from headrace.executors.loading import LoadedModel, kv_specs, load_model
from headrace.models.bridge.choose import definition_for
from headrace.models.opening import open_checkpoint, reading_configuration, resolve_model
from headrace.plugins.speculative.draft_length import DraftLengths
from headrace.plugins.speculative.draft_sampler import LOGITS_ROWS, DraftSampler
from headrace.plugins.speculative.observe import observe
from headrace.plugins.speculative.options import SpeculativeSection
from headrace.plugins.speculative.vocabulary import check_vocabulary

__all__ = ["DraftModelProposer"]

LAYER_PREFIX = "draft."
"""Before the names of its attention layers, so that they are none of the model's."""


@dataclass
class _Request:
    """What the draft model knows of a request."""

    request_id: str
    params: SamplingParams
    stash: Stash
    num_prompt_tokens: int
    ids: NDArray[np.int64]
    """Confirmed ones, and drafts behind them."""
    num_valid: int
    """Its KV of positions below this is that of `ids`."""
    num_known: int = 0
    """Confirmed."""

    def take(self, row: BatchRow, tokens: Sequence[int]) -> None:
        """Take in what a step confirmed."""
        self.ids[self.num_known : row.num_confirmed] = row.tokens[self.num_known : row.num_confirmed]
        self.num_known = row.num_confirmed + len(tokens)
        self.ids[row.num_confirmed : self.num_known] = tokens
        if tokens:
            # Of drafts, all but the last confirmed id are as they were; that one was drawn.
            self.num_valid = min(self.num_valid, self.num_known - 1)


@dataclass
class _Work:
    """What is to be computed for a request in this step."""

    request: _Request
    blocks: Sequence[Sequence[int]]
    """A KV group of the layout."""
    num_drafts: int
    drafts: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def num_ids(self) -> int:
        """Confirmed ids and drafts so far: what is computed reaches up to here."""
        return self.request.num_known + len(self.drafts)

    @property
    def wants_more(self) -> bool:
        return len(self.drafts) < self.num_drafts and not self.failed


class DraftModelProposer(Proposer):
    """Runs the draft model behind each step: over what it has not seen yet, then token by token.

    Raises `CheckpointError` or `ConfigError` where it cannot be loaded, or has another vocabulary.
    """

    name = "draft_model"

    def __init__(
        self, context: WorkerContext, section: SpeculativeSection, lengths: DraftLengths | None = None
    ) -> None:
        self._config = context.config
        self._device = context.device
        self.lookahead = section.num_speculative_tokens
        self._lengths = lengths or DraftLengths(section.num_speculative_tokens, adaptive=section.adaptive)
        self._loaded, self._longest = _load(context, section.model or "")
        self.token_equal = section.acceptance == "same"
        self._sampler = DraftSampler(context, self._loaded.sampling, section)
        self._room = context.max_model_len + section.num_speculative_tokens + 1
        """Ids a request may have, drafts included."""
        self._requests: dict[str, _Request] = {}
        self._memory: KVMemory | None = None
        self._forward: Forward | None = None
        self._spent = 0.0
        """Seconds the last call took: they are a part of what its drafts cost."""

    def kv_specs(self) -> Mapping[str, KVCacheSpec]:
        """What its attention layers keep."""
        return kv_specs(self._loaded, self._config.cache.block_size)

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int) -> None:
        """Make its memory, and record its forward pass where that can be done."""
        self._memory = KVMemory(self._loaded, layout, num_blocks)
        self._forward = best_forward(self._loaded, self._memory, self._config)

    # Requests ----------------------------------------------------------------------------------------

    def on_add(self, request: NewRequest) -> None:
        """Begin; what the prefix cache had was drafted on before."""
        if request.params.max_tokens == 0:
            return
        self._requests[request.request_id] = _Request(
            request.request_id,
            self._sampler.add(request),
            request.stash,
            request.num_prompt_tokens,
            np.zeros(self._room, np.int64),
            request.start,
        )

    def on_remove(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self._sampler.remove(request_id)
        self._lengths.forget(request_id)

    # A step ------------------------------------------------------------------------------------------

    def distributions(self, request_id: str) -> Sequence[DraftDistribution]:
        """What drafts were drawn from, where rejection sampling was chosen."""
        return self._sampler.distributions(request_id)

    def propose(
        self, batch: RunnerBatch, hidden: torch.Tensor, taps: Mapping[int, torch.Tensor], result: StepResult
    ) -> Mapping[str, Sequence[int]]:
        """Draft for the requests where that pays, and follow prompts meanwhile."""
        begun = time.perf_counter()
        num_drawing = observe(self._lengths, batch, result, begun - batch.started + self._spent)
        works: list[_Work] = []
        for row in batch.rows:
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            tokens = result.requests[row.request_id].tokens
            request.take(row, tokens)
            if request.num_known > self._longest:
                continue
            count = self._num_drafts(request, row, num_drawing) if tokens else 0
            # Prompts are followed whether or not a draft comes next: their blocks go to the prefix cache.
            prompt = row.count > row.num_drafts + 1
            if count or (prompt and self._lengths.pays(row.request_id, max(1, num_drawing))):
                works.append(_Work(request, row.block_ids, count))
        if works:
            self._catch_up(works)
            while drafting := [work for work in works if work.wants_more]:
                self._advance(drafting)
        self._spent = time.perf_counter() - begun
        return {work.request.request_id: work.drafts for work in works if work.drafts}

    def _num_drafts(self, request: _Request, row: BatchRow, num_drawing: int) -> int:
        """Return how many to draft: no more than may stay, than there are places for, and than pays."""
        places = len(row.block_ids[0]) * self._config.cache.block_size if row.block_ids else 0
        # The last draft is not computed.
        most = min(places, self._longest) - request.num_known + 1
        max_tokens = request.params.max_tokens
        if max_tokens is not None:
            most = min(most, request.num_prompt_tokens + max_tokens - request.num_known - 1)
        return min(most, self._lengths.choose(request.request_id, num_drawing)) if most > 0 else 0

    def _catch_up(self, works: Sequence[_Work]) -> None:
        """Compute confirmed ids not seen yet, in steps of bounded size; draft the first token behind them."""
        room = limit = self._config.scheduler.max_num_batched_tokens
        step: list[tuple[_Work, int]] = []
        for work in works:
            start = work.request.num_valid
            while start < work.request.num_known:
                end = min(work.request.num_known, start + room)
                step.append((work, end))
                room -= end - start
                start = end
                if room == 0:
                    self._compute(step)
                    step, room = [], limit
        if step:
            self._compute(step)

    def _advance(self, works: Sequence[_Work]) -> None:
        """Compute the last draft of each, and draft another."""
        self._compute([(work, work.num_ids) for work in works])

    def _compute(self, step: Sequence[tuple[_Work, int]]) -> None:
        """Run the model over ids up to `end` of each; where that is all there is, draw what comes next."""
        if self._forward is None or self._memory is None:
            raise RuntimeError("a step came before KV memory was made; allocate_kv comes first")
        requests = [work.request for work, _ in step]
        starts = np.array([request.num_valid for request in requests], np.int64)
        counts = np.array([end for _, end in step], np.int64) - starts
        size = self._config.cache.block_size
        num_blocks = -(-int((starts + counts).max()) // size)
        tables = [
            _padded([work.blocks[group] for work, _ in step], num_blocks)
            for group in self._memory.group_indices
        ]
        places, groups = attention_batches(tables, starts, counts, size, self._device)
        ids = np.concatenate(
            [request.ids[s : s + c] for request, s, c in zip(requests, starts, counts, strict=True)]
        )
        x = self._loaded.model.embed(torch.from_numpy(ids).to(self._device))
        positions = torch.from_numpy(places.positions).to(self._device)
        hidden, _ = self._forward(x, positions, groups)
        ready: list[_Work] = []
        last: list[int] = []
        for (work, end), stop in zip(step, places.query_start[1:].tolist(), strict=True):
            work.request.num_valid = end
            if end == work.num_ids and work.wants_more:
                ready.append(work)
                last.append(stop - 1)
        for first in range(0, len(ready), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            self._draw(ready[part], self._loaded.model.logits(hidden[last[part]]))

    def _draw(self, works: Sequence[_Work], logits: torch.Tensor) -> None:
        rows = [
            LogitsRow(
                work.request.request_id,
                work.request.params,
                work.request.stash,
                work.request.num_prompt_tokens,
                work.num_ids,
                work.request.ids[: work.num_ids],  # type: ignore[arg-type]
                work.request.num_known,
            )
            for work in works
        ]
        for work, token in zip(works, self._sampler.draw(rows, logits), strict=True):
            if token is None:
                work.failed = True
                continue
            work.request.ids[work.num_ids] = token
            work.drafts.append(token)


def _load(context: WorkerContext, name: str) -> tuple[LoadedModel, int]:
    """Open, check and load the draft model; return how long its requests may be as well."""
    path = resolve_model(name, context.registry)
    checkpoint = open_checkpoint(path, context.registry)
    try:
        with reading_configuration(checkpoint):
            definition, _ = definition_for(checkpoint.config, context.registry, "auto")
            longest = min(context.max_model_len, definition.max_model_len(checkpoint.config))
        check_vocabulary(context, checkpoint, name)
        build = ExecutorBuild(
            config=context.config.model_copy(
                update={"model": name, "model_impl": "auto", "quantization": None}
            ),
            registry=context.registry,
            model_path=path,
            max_model_len=longest,
            dtype=context.dtype,
            checkpoint=checkpoint,
        )
        return load_model(build, context.device, LAYER_PREFIX), longest
    finally:
        checkpoint.close()


def _padded(tables: Sequence[Sequence[int]], num_blocks: int) -> NDArray[np.int32]:
    """[R, num_blocks]; what a request lacks is not read."""
    padded = np.zeros((len(tables), num_blocks), np.int32)
    for row, table in zip(padded, tables, strict=True):
        count = min(len(table), num_blocks)
        row[:count] = table[:count]
    return padded
