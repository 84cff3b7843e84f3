"""The runner: a plan in, a result out. One a worker; everything in between is a part it was given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.core.errors import EngineError, PluginCallError, RequestError
from headrace.core.interfaces import (
    BatchRow,
    KVCacheLayout,
    LinearWrapper,
    LogitsRow,
    RunnerListener,
)
from headrace.core.interfaces.build import ExecutorBuild, WorkerContext
from headrace.core.interfaces.wrapping import WrapContext
from headrace.core.logprobs import LOGPROBS, PROMPT_LOGPROBS, PromptLogprobs, TokenLogprobs
from headrace.core.plan import Continued, NewRequest, RequestResult, StepPlan, StepResult
from headrace.core.stash import Stash
from headrace.executors.batch import PersistentBatch, RowState, StepInputs
from headrace.executors.context import KVMemory
from headrace.executors.graphs import Forward, best_forward
from headrace.executors.listeners import RunnerListeners
from headrace.executors.loading import LoadedModel, kv_layout, load_model
from headrace.executors.process import give_back_memory
from headrace.executors.proposing import Proposing, build_proposer
from headrace.executors.sampler import Sampled, Sampler
from headrace.executors.scoring import token_logprobs
from headrace.models.opening import open_tokenizer

__all__ = ["ModelRunner"]

LOGITS_ROWS = 64
"""Logits are made for at most so many rows at once: vocabularies are large."""


@dataclass(frozen=True)
class _StepView:
    """A step as listeners and proposers see it."""

    step: int
    started: float
    stash: Stash
    rows: Sequence[BatchRow]


class ModelRunner:
    """Keeps the model, KV memory and the persistent batch of one worker."""

    def __init__(self, build: ExecutorBuild, device: str) -> None:
        self._build = build
        self._wrappers = _wrappers(build, device)
        self._loaded: LoadedModel = load_model(build, device, wrappers=self._wrappers)
        give_back_memory()
        self._model = self._loaded.model
        context = WorkerContext(
            config=build.config,
            registry=build.registry,
            device=device,
            vocab_size=self._model.vocab_size,
            model_config=self._loaded.config,
            model_path=build.model_path,
            max_model_len=build.max_model_len,
            dtype=build.dtype,
            model=self._model,
            tokenizer=partial(open_tokenizer, build.model_path, build.registry),
        )
        listeners: list[RunnerListener] = [
            *self._wrappers,
            *(entry.factory(context) for entry in build.registry.entries("runner_listener")),
        ]
        self._listeners = RunnerListeners(listeners)
        self._proposing = Proposing(build_proposer(context), self._model.vocab_size)
        self._proposing.tap(self._model)
        self._sampler = Sampler(
            [(e.name, e.factory, e.plugin) for e in build.registry.entries("logits_processor")],
            listeners,
            self._model.vocab_size,
            self._loaded.sampling,
            build.config.logprobs_mode,
        )
        self.layout: KVCacheLayout = kv_layout(
            self._loaded, self._proposing.kv_specs(), build.config.cache.block_size
        )
        self.lookahead = self._proposing.lookahead
        self._loaded.report["proposer"] = self._proposing.name
        self._loaded.report["token_equal"] = self._proposing.token_equal
        self._forward: Forward | None = None
        self._own_groups: Sequence[int] = ()
        self._batch = PersistentBatch(
            build.config.scheduler.max_num_seqs,
            build.max_model_len,
            build.config.cache.block_size,
            len(self.layout.groups),
        )

    @property
    def report(self) -> Mapping[str, Any]:
        """Facts for the start-up report."""
        return self._loaded.report

    def allocate_kv(self, num_blocks: int) -> None:
        """Make KV memory for block ids [0, num_blocks]."""
        self._proposing.allocate_kv(self.layout, num_blocks)
        memory = KVMemory(self._loaded, self.layout, num_blocks)
        self._own_groups = memory.group_indices
        self._forward = best_forward(self._loaded, memory, self._build.config)

    def reset(self) -> None:
        """Forget every request; model and KV memory stay."""
        for request_id in self._batch.request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._batch.remove(request_id)
        self._sampler.remove(request_id)
        self._proposing.on_remove(request_id)
        self._listeners.on_remove(request_id)

    def call_plugin(self, plugin: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a runner listener by its name."""
        for listener in self._listeners.all:
            if listener.name == plugin:
                return getattr(listener, method)(*args, **kwargs)
        raise EngineError(
            f"no runner listener is called {plugin!r}; there are: {[one.name for one in self._listeners.all]}"
        )

    # A step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. What one request is to blame for fails that request; what raises fails the step."""
        started = time.perf_counter()
        for request_id in plan.removed:
            self._forget(request_id)
        result = StepResult(step=plan.step, requests={})
        states: list[RowState] = []
        starts: list[int] = []
        counts: list[int] = []
        entries: list[NewRequest | Continued] = [*plan.new, *plan.continued]
        for entry in entries:
            state, outcome = self._enter(entry)
            if outcome is not None:
                result.requests[entry.request_id] = outcome
                continue
            states.append(state)
            starts.append(entry.start)
            counts.append(entry.count)
        if states:
            inputs = self._batch.inputs(states, starts, counts, self._loaded.device)
            self._run(inputs, self._view(plan, inputs, started), result)
        return result

    def _enter(self, entry: NewRequest | Continued) -> tuple[RowState, RequestResult | None]:
        """Bring a request's state up to the plan; a result instead of None: it has no part in this step."""
        if isinstance(entry, NewRequest):
            state = self._batch.add(entry)
            try:
                self._sampler.add(entry)
                self._listeners.on_add(entry)
            except (RequestError, PluginCallError) as error:
                return state, RequestResult(
                    num_computed=state.num_computed, error=str(error), error_kind=error.kind
                )
            self._proposing.on_add(entry)
            return state, None
        state = self._batch.advance(entry)
        if entry.start > state.num_computed:  # sent before a rollback was known
            return state, RequestResult(num_computed=state.num_computed)
        if entry.start < state.num_computed:
            raise EngineError(
                f"worker and scheduler drifted: request {entry.request_id!r} is planned from {entry.start}, and "
                f"{state.num_computed} tokens are computed"
            )
        del state.drafts[entry.num_drafts :]
        return state, None

    def _run(self, inputs: StepInputs, view: _StepView, result: StepResult) -> None:
        if self._forward is None:
            raise EngineError("a plan was sent before KV memory was made; allocate_kv comes first")
        self._listeners.on_batch(view)
        x = self._listeners.on_embed(view, self._model.embed(inputs.ids))
        groups = [inputs.groups[index] for index in self._own_groups]
        hidden, taps = self._forward(x, inputs.positions, groups)
        self._listeners.on_hidden(view, hidden)
        sampled = self._sample(inputs, hidden)
        for index, state in enumerate(inputs.states):
            result.requests[state.request_id] = self._outcome(inputs, index, sampled[index])
        self._score_prompts(inputs, hidden, result)
        self._listeners.on_tokens(view, result)
        for state in inputs.states:
            self._confirm(state, result.requests[state.request_id])
        if self._proposing.active:
            drafts = self._proposing.propose(view, hidden, taps, result)
            self._note_drafts(inputs.states, drafts, result)

    def _confirm(self, state: RowState, outcome: RequestResult) -> None:
        # A listener may have dropped tokens; KV behind the last confirmed one is not valid.
        if state.params.max_tokens != 0:
            outcome.num_computed = min(outcome.num_computed, state.num_tokens + len(outcome.tokens) - 1)
        logprobs = outcome.stash.get(LOGPROBS)
        if logprobs is not None:
            del logprobs[len(outcome.tokens) :]
        self._batch.confirm(state, outcome.tokens, outcome.num_computed, ())

    def _note_drafts(
        self, states: Sequence[RowState], drafts: Mapping[str, list[int]], result: StepResult
    ) -> None:
        for state in states:
            own, outcome = drafts.get(state.request_id), result.requests[state.request_id]
            if own and outcome.tokens and outcome.error is None and outcome.finish_reason is None:
                outcome.drafts = own
                self._batch.confirm(state, (), state.num_computed, own)

    def _view(self, plan: StepPlan, inputs: StepInputs, started: float) -> _StepView:
        rows: list[BatchRow] = []
        if self._proposing.active or self._listeners.need_rows:
            rows = [
                BatchRow(
                    state.request_id,
                    state.params,
                    state.stash,
                    state.num_prompt_tokens,
                    int(start),
                    int(count),
                    self._batch.tokens(state, int(start + count)),  # type: ignore[arg-type]
                    len(state.drafts),
                    self._batch.block_ids(state),
                    self._drawn_first(state),
                )
                for state, start, count in zip(inputs.states, inputs.starts, inputs.counts, strict=True)
            ]
        return _StepView(plan.step, started, plan.stash, rows)

    # Tokens ------------------------------------------------------------------------------------------

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> list[list[Sampled]]:
        """Draw behind the last confirmed token of each request that reaches it, and behind each of its drafts."""
        rows: list[LogitsRow] = []
        indices: list[int] = []
        ends = (inputs.starts + inputs.counts).tolist()
        offsets = (inputs.query_start[:-1] - inputs.starts).tolist()
        spans: list[tuple[int, int]] = []
        for state, end, offset in zip(inputs.states, ends, offsets, strict=True):
            first = len(rows)
            draws = state.params.max_tokens != 0
            judged = self._proposing.distributions(state.request_id) if state.drafts else ()
            for position in range(state.num_tokens, end + 1) if draws else ():
                indices.append(offset + position - 1)
                place = position - state.num_tokens
                told = place < min(len(judged), len(state.drafts))
                rows.append(
                    LogitsRow(
                        state.request_id,
                        state.params,
                        state.stash,
                        state.num_prompt_tokens,
                        position,
                        self._batch.tokens(state, position),  # type: ignore[arg-type]
                        state.num_tokens,
                        state.drafts[place] if told else None,
                        judged[place] if told else None,
                        self._drawn_first(state),
                    )
                )
            spans.append((first, len(rows)))
        sampled: list[Sampled] = []
        for first in range(0, len(rows), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            sampled += self._sampler.sample(rows[part], self._logits(hidden, indices[part]))
        return [sampled[first:last] for first, last in spans]

    def _drawn_first(self, state: RowState) -> bool:
        return not state.drafts and self._sampler.draws_first(state.request_id)

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Make logits of rows of the step, which rise."""
        for wrapper in self._wrappers:
            wrapper.on_head_rows(rows)
        return self._model.logits(hidden if len(rows) == len(hidden) else hidden[rows])

    def _outcome(self, inputs: StepInputs, index: int, sampled: list[Sampled]) -> RequestResult:
        """Accept what was drawn, as long as drafts are what was drawn."""
        state = inputs.states[index]
        end = int(inputs.starts[index] + inputs.counts[index])
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, one in enumerate(sampled):
            if one.error is not None:
                return RequestResult(
                    num_computed=state.num_computed, error=one.error, error_kind=one.error_kind
                )
            tokens.append(one.token_id)
            if one.logprobs is not None:
                logprobs.append(one.logprobs)
            if i < len(state.drafts) and state.drafts[i] != one.token_id:
                break
        computed = min(end, state.num_tokens + len(tokens) - 1) if tokens else end
        outcome = RequestResult(tokens=tokens, num_computed=computed)
        if logprobs:
            outcome.stash[LOGPROBS] = logprobs
        return outcome

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor, result: StepResult) -> None:
        """Log-probabilities of prompt tokens, for the requests that ask, of this chunk's positions."""
        for index, state in enumerate(inputs.states):
            wanted = state.params.prompt_logprobs
            start, offset = int(inputs.starts[index]), int(inputs.query_start[index])
            count = min(int(inputs.counts[index]), state.num_prompt_tokens - 1 - start)
            if wanted is None or count <= 0:
                continue
            targets = self._batch.tokens(state, start + count + 1)[start + 1 :].tolist()
            scored: list[TokenLogprobs] = []
            for first in range(0, count, LOGITS_ROWS):
                last = min(first + LOGITS_ROWS, count)
                logits = self._logits(hidden, list(range(offset + first, offset + last)))
                scored += token_logprobs(logits, targets[first:last], wanted, self._loaded.sampling.score)
            result.requests[state.request_id].stash[PROMPT_LOGPROBS] = PromptLogprobs(start + 1, scored)


def _wrappers(build: ExecutorBuild, device: str) -> list[LinearWrapper]:
    """Make what is to stand around the model's products."""
    context = WrapContext(build.config, build.registry, device, build.dtype)
    made = [entry.factory(context) for entry in build.registry.entries("linear_wrapper")]
    return [wrapper for wrapper in made if wrapper is not None]
