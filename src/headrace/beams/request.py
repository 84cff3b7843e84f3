"""A prompt under beam search: what the engine is asked in each step, and the output that comes of it.

Each step asks for one token behind every running beam, with the log-probabilities of the likeliest. The engine knows
nothing of beams: what they have in common is in its prefix cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.beams.params import BeamSearchParams
from headrace.beams.search import Beam, BeamSearch
from headrace.core.errors import RequestError
from headrace.core.sampling_params import SamplingParams
from headrace.front_half import FrontHalf
from headrace.frontend import FrontEnd, Prepared
from headrace.output.detokenizer import IncrementalDetokenizer
from headrace.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["BeamRequest", "search_all"]


class BeamRequest:
    """One prompt. Run `requests` and hand their outputs to `take` until it `is_over`; `output` is the result.

    Raises `RequestError` as `FrontEnd.prepare` does, and for a width that needs more log-probabilities than the
    engine gives.
    """

    def __init__(
        self,
        front: FrontEnd,
        half: FrontHalf,
        prompt: Any,
        params: BeamSearchParams,
        *,
        is_chat: bool = False,
        request_id: str | None = None,
        priority: int = 0,
    ) -> None:
        self._front = front
        self._half = half
        self._params = params
        self._priority = priority
        self._check_width()
        # The first step's request, which is checked and tokenized like every other.
        self._first: Prepared | None = front.prepare(
            prompt,
            self._step_params(),
            is_chat=is_chat,
            request_id=None if request_id is None else f"{request_id}.0",
            priority=priority,
        )
        asked = self._first.front
        self._names = itertools.count(1)
        room = half.max_model_len - len(asked.prompt_token_ids)
        most = room if params.max_tokens is None else min(room, params.max_tokens)
        self._search = BeamSearch(params, most, half.eos_token_ids)
        self._output = RequestOutput(
            request_id=request_id if request_id is not None else asked.request_id,
            prompt=asked.prompt,
            prompt_token_ids=asked.prompt_token_ids,
            metrics=RequestMetrics(asked.arrival_time),
            outputs=[],
        )

    def _check_width(self) -> None:
        needed, most = self._num_logprobs(), self._half.config.max_logprobs
        if most != -1 and needed > most:
            raise RequestError(
                f"beam_width {self._params.beam_width} (with logprobs {self._params.logprobs}) looks at {needed} "
                f"candidates a token, at most {most} are allowed; lower it, or start with a larger max_logprobs",
                param="beam_width",
            )

    def _num_logprobs(self) -> int:
        search = BeamSearch(self._params, 1, self._half.eos_token_ids)
        return max(search.num_candidates, self._params.logprobs or 0)

    def _step_params(self) -> SamplingParams:
        """Neutral values are spelt out, so that the model's own defaults have no part in it."""
        return SamplingParams(
            max_tokens=1,
            temperature=self._params.temperature,
            seed=0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            ignore_eos=True,
            logprobs=self._num_logprobs(),
            logprobs_mode="processed_logprobs",
            detokenize=self._params.logprobs is not None,
        )

    @property
    def is_over(self) -> bool:
        """Whether `output` is complete."""
        return self._output.finished

    @property
    def output(self) -> RequestOutput:
        """One answer a beam, best score first; `cumulative_logprob` and the number of tokens make the score."""
        return self._output

    def requests(self) -> list[Prepared]:
        """Return what the engine is to be asked now: one request a running beam. Raises `RequestError`."""
        if self._first is not None:
            first, self._first = self._first, None
            return [first]
        prompt, name = self._output.prompt_token_ids, self._output.request_id
        return [
            self._front.prepare(
                {"prompt_token_ids": [*prompt, *beam.token_ids]},
                self._step_params(),
                request_id=f"{name}.{next(self._names)}",
                priority=self._priority,
            )
            for beam in self._search.running
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Go a token further. outputs: of `requests`, finished. One that failed ends the search, and says why."""
        self._note(outputs)
        continuations = []
        for output in outputs:
            (answer,) = output.outputs
            if not answer.logprobs:
                self._output.outputs = [
                    CompletionOutput(
                        0,
                        finish_reason=answer.finish_reason,
                        error=answer.error,
                        error_kind=answer.error_kind,
                    )
                ]
                self._output.error = answer.error
                self._finish()
                return
            continuations.append(answer.logprobs[0])
        self._search.advance(continuations)
        if self._search.is_over:
            self._output.outputs = [self._answer(i, beam) for i, beam in enumerate(self._search.results)]
            self._finish()

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        """Take over times and counts; those of the first step are those of the prompt."""
        metrics = self._output.metrics
        if metrics.first_token_time is None:
            (first,) = outputs
            metrics.first_scheduled_time = first.metrics.first_scheduled_time
            metrics.first_token_time = first.metrics.first_token_time
            self._output.num_cached_tokens = first.num_cached_tokens
        metrics.num_preemptions += sum(output.metrics.num_preemptions for output in outputs)

    def _finish(self) -> None:
        self._output.finished = True
        self._output.metrics.finished_time = time.time()

    def _answer(self, index: int, beam: Beam) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self._text(beam),
            token_ids=list(beam.token_ids),
            finish_reason="stop" if beam.ended else "length",
            cumulative_logprob=beam.logprob,
            logprobs=None if self._params.logprobs is None else self._logprobs(beam, self._params.logprobs),
        )

    def _text(self, beam: Beam) -> str:
        half, params = self._half, self._params
        if half.tokenizer is None:
            return ""
        detokenizer = IncrementalDetokenizer(
            half.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            eos_token_ids=half.eos_token_ids,
            prompt_token_ids=self._output.prompt_token_ids,
        )
        shown = beam.token_ids[:-1] if beam.ended else beam.token_ids
        text = "".join(map(detokenizer.push, shown)) + detokenizer.flush()
        end = beam.token_ids[-1] if beam.ended and params.include_stop_str_in_output else -1
        if 0 <= end < half.tokenizer.vocab_size:
            text += half.tokenizer.token_bytes(end).decode("utf-8", "replace")
        return text

    def _logprobs(self, beam: Beam, count: int) -> list[dict[int, Logprob]]:
        """The token itself first, then the likeliest, as every output has them."""
        entries = []
        for token_id, candidates in zip(beam.token_ids, beam.candidates, strict=True):
            entry = {token_id: candidates[token_id]}
            ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
            entries.append(entry | {i: one for i, one in ranked if one.rank <= count})
        return entries


def search_all(
    searches: Sequence[BeamRequest],
    run: Callable[[list[Prepared]], list[RequestOutput]],
    on_end: Callable[[], object] = lambda: None,
) -> list[RequestOutput]:
    """Run searches side by side to their ends. run: runs requests to theirs, in order. on_end: called for each."""
    while asking := [search for search in searches if not search.is_over]:
        requests = [search.requests() for search in asking]
        outputs = iter(run([request for own in requests for request in own]))
        for search, own in zip(asking, requests, strict=True):
            search.take([next(outputs) for _ in own])
            if search.is_over:
                on_end()
    return [search.output for search in searches]
