"""What the core says about requests, turned into what callers get: the front end's last room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import RequestError
from headrace.core.interfaces import Tokenizer
from headrace.core.logprobs import PROMPT_LOGPROBS
from headrace.core.plan import EngineOutput
from headrace.output.completion import Completion, FrontRequest
from headrace.output.logprobs import PromptLogprobsBuilder, TokenTexts
from headrace.outputs import CompletionDelta, RequestMetrics, RequestOutput, RequestUpdate

__all__ = ["OutputProcessor", "ProcessedOutputs"]


@dataclass
class ProcessedOutputs:
    """What a batch of engine outputs came to."""

    updates: list[RequestUpdate] = field(default_factory=list)
    """Requests with something new, one entry each, finished ones included for the last time."""
    to_finish: list[tuple[str, str]] = field(default_factory=list)
    """(id of an answer, reason): what ended here and still runs in the core, which must be told."""


@dataclass
class _Tracked:
    """A request that is not finished."""

    output: RequestOutput
    completions: list[Completion]
    child_ids: list[str]
    prompt_logprobs: PromptLogprobsBuilder | None
    preemptions: list[int]
    """By answer."""
    num_unfinished: int
    """Answers."""


class OutputProcessor:
    """Keeps every unfinished request's output. Not thread-safe: called where the front end's loop runs.

    Parameters
    ----------
    tokenizer: None: ids only, no text.
    clock: seconds since the epoch.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, clock: Callable[[], float] = time.time) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None else None
        self._clock = clock
        self._requests: dict[str, _Tracked] = {}
        self._answers: dict[str, tuple[_Tracked, int]] = {}
        """Unfinished answers by the core's id: their request and index."""

    @property
    def num_unfinished(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def add(self, request: FrontRequest) -> RequestOutput:
        """Begin a request; its answers are known to the core by `request.child_ids`.

        Raises `RequestError` if an id is in use, or if stop strings need a tokenizer that is not there.
        """
        params = request.params
        child_ids = request.child_ids
        if request.request_id in self._requests or any(child in self._answers for child in child_ids):
            raise RequestError(
                f"request_id {request.request_id!r} belongs to a request that is not finished; ids must be unique "
                "among running requests",
                param="request_id",
            )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"stop: stop strings need a tokenizer and this model has none, got {params.stop!r:.100}; use "
                "stop_token_ids",
                param="stop",
            )
        texts = self._texts if params.detokenize else None
        completions = [Completion(request, index, self._tokenizer, texts) for index in range(params.n)]
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            metrics=RequestMetrics(request.arrival_time),
            outputs=[completion.output for completion in completions],
        )
        builder = None
        if params.prompt_logprobs is not None:
            builder = PromptLogprobsBuilder(len(request.prompt_token_ids), texts)
            output.prompt_logprobs = builder.complete  # a prompt of one token has none to wait for
        tracked = _Tracked(output, completions, child_ids, builder, [0] * params.n, params.n)
        self._requests[request.request_id] = tracked
        self._answers.update((child, (tracked, index)) for index, child in enumerate(child_ids))
        return output

    def process(self, engine_outputs: Sequence[EngineOutput]) -> ProcessedOutputs:
        """Take in what the core sent, in order. What is said of finished or unknown requests is dropped."""
        batch = _Batch()
        for engine_output in engine_outputs:
            answer = self._answers.get(engine_output.request_id)
            if answer is None:
                continue
            tracked, index = answer
            self._note(tracked, index, engine_output)
            delta = self._take(tracked, index, engine_output)
            if delta.finish_reason is not None and engine_output.finish_reason is None:
                batch.result.to_finish.append((engine_output.request_id, delta.finish_reason))
            self._deliver(batch, tracked, delta)
        return batch.result

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """End requests, all answers of each, with reason `abort`; finished and unknown ids are passed over."""
        batch = _Batch()
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            for child, completion in zip(tracked.child_ids, tracked.completions, strict=True):
                if not completion.output.finished:
                    batch.result.to_finish.append((child, "abort"))
                    self._deliver(batch, tracked, completion.end("abort"))
        return batch.result

    def _take(self, tracked: _Tracked, index: int, engine_output: EngineOutput) -> CompletionDelta:
        completion = tracked.completions[index]
        try:
            if tracked.prompt_logprobs is not None:
                part = engine_output.stash.get(PROMPT_LOGPROBS)
                if part is not None:
                    tracked.prompt_logprobs.add(part)
                    tracked.output.prompt_logprobs = tracked.prompt_logprobs.complete
            return completion.take(engine_output)
        except Exception as error:  # noqa: BLE001 - a tokenizer's fault ends the request it was called for, no other
            return completion.end("error", f"its output could not be read: {type(error).__name__}: {error}")

    def _note(self, tracked: _Tracked, index: int, engine_output: EngineOutput) -> None:
        """Take over times and counts."""
        metrics = tracked.output.metrics
        scheduled = engine_output.scheduled_time
        if scheduled is not None:
            metrics.first_scheduled_time = min(scheduled, metrics.first_scheduled_time or scheduled)
        if engine_output.new_token_ids and metrics.first_token_time is None:
            metrics.first_token_time = self._clock()
        more = max(0, engine_output.num_preemptions - tracked.preemptions[index])
        tracked.preemptions[index] += more
        metrics.num_preemptions += more
        if index == 0:
            cached = max(tracked.output.num_cached_tokens, engine_output.num_cached_tokens)
            tracked.output.num_cached_tokens = cached

    def _deliver(self, batch: _Batch, tracked: _Tracked, delta: CompletionDelta) -> None:
        """Put a delta in the batch, and let go of what it finishes."""
        if delta.is_empty:
            return
        batch.add(tracked.output, delta)
        if delta.finish_reason is None:
            return
        output = tracked.output
        output.error = output.error or delta.error
        del self._answers[tracked.child_ids[delta.index]]
        tracked.num_unfinished -= 1
        if tracked.num_unfinished == 0:
            output.finished = True
            output.metrics.finished_time = self._clock()
            del self._requests[output.request_id]


class _Batch:
    """Gathers deltas by request."""

    def __init__(self) -> None:
        self.result = ProcessedOutputs()
        self._updates: dict[str, RequestUpdate] = {}

    def add(self, output: RequestOutput, delta: CompletionDelta) -> None:
        update = self._updates.get(output.request_id)
        if update is None:
            update = self._updates[output.request_id] = RequestUpdate(output, [])
            self.result.updates.append(update)
        update.deltas.append(delta)
