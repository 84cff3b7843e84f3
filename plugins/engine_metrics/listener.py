"""The core half: hears of every request and every step, and keeps the sums."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from headrace.core.interfaces import EngineListener
from headrace.core.interfaces.build import CoreContext
from headrace.core.metrics import series_name
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.core.stash import StashKey
from headrace.plugins.engine_metrics.described import FINISH_REASONS, histograms

__all__ = ["NUM_ANSWERS", "EngineMetrics"]

NUM_ANSWERS: StashKey[int] = StashKey("engine_metrics/num_answers", int, direction="request")
"""How many answers the request asked for that this one is an answer of; absent: one."""

LONGEST = 200_000
"""Where the counts of tokens end in histograms, for an engine that takes the model's own length."""


class EngineMetrics(EngineListener):
    """Counters and histograms since the engine started.

    The rule for requests with several answers: every series counts answers, because the engine runs each as a
    request of its own. `n=3` is three requests running, three that ended, three prompts taken in (two of which the
    prefix cache mostly knows). A list of prompts is as many requests as there are prompts, times `n`.

    `generation_tokens` and `prompt_tokens` move with every step. The former is the sum of what answers hold, of
    those under way too: it equals the sum of their usages. An answer that its front end ends, because a stop string
    was found or its client left, may have been given a few tokens more in the core by then; those count here.

    Each request that was accepted is observed once, when it ends, by each `request_…` histogram and by
    `e2e_request_latency_seconds`, whatever ended it: queue, prefill and decode time add up to that. Those between
    tokens need two tokens, that to the first token needs one.

    clock: seconds since the epoch, as `EngineRequest.arrival_time`.
    """

    name = "engine_metrics"

    def __init__(self, context: CoreContext, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps = 0
        self._step_requests = 0
        self._max_step_requests = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._histograms = histograms(context.config.max_model_len or LONGEST)
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._to_first = self._histograms["time_to_first_token_seconds"]
        self._to_next = self._histograms["inter_token_latency_seconds"]
        self._requests: dict[str, _Tracked] = {}
        self._in_prefill: dict[str, _Tracked] = {}
        """Those admitted whose prompts are not wholly counted."""

    def on_add(self, request: Request) -> None:
        """Follow the request."""
        self._requests[request.request_id] = _Tracked(request)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the step and its tokens."""
        num_requests = plan.num_requests
        self._steps += 1
        self._step_requests += num_requests
        self._max_step_requests = max(self._max_step_requests, num_requests)
        self._step_tokens.observe(plan.num_tokens)
        if plan.new:
            self._begin(plan)
        if self._in_prefill:
            self._count_prompts(result)
        self._count_tokens(plan.step, result)

    def _begin(self, plan: StepPlan) -> None:
        """Note whose prompts are about to be counted, after a preemption anew."""
        for entry in plan.new:
            tracked = self._requests.get(entry.request_id)
            if tracked is None or plan.step < tracked.first_step:
                continue  # it ended meanwhile, and another may have its name by now
            if tracked.prompt_counted < tracked.request.num_prompt_tokens:
                self._in_prefill[entry.request_id] = tracked

    def _count_prompts(self, result: StepResult) -> None:
        for name, tracked in list(self._in_prefill.items()):
            outcome = result.requests.get(name)
            if outcome is not None:
                self._count_prompt(tracked, outcome.num_computed)

    def _count_prompt(self, tracked: _Tracked, num_computed: int) -> None:
        """Count how far a prompt got; what is computed again after a preemption was counted before."""
        request = tracked.request
        reached = min(num_computed, request.num_prompt_tokens)
        if reached <= tracked.prompt_counted:
            return
        if not tracked.prompt_counted:
            self._cached_tokens += request.num_cached
        self._prompt_tokens += reached - tracked.prompt_counted
        tracked.prompt_counted = reached
        if reached == request.num_prompt_tokens:
            self._in_prefill.pop(request.request_id, None)

    def _count_tokens(self, step: int, result: StepResult) -> None:
        """Count what was generated. Runs over every request of every step: keep it short."""
        now = self._clock()
        requests, generated = self._requests, 0
        since: dict[
            float, int
        ] = {}  # most requests had their last token in one step: one observation for all
        for name, outcome in result.requests.items():
            count = len(outcome.tokens)
            tracked = requests.get(name)
            if not count or tracked is None or step < tracked.first_step:
                continue
            generated += count
            tracked.generated += count
            last, tracked.last_token = tracked.last_token, now
            if not last:
                tracked.first_token = now
                self._to_first.observe(max(0.0, now - tracked.request.arrival_time))
            elif count == 1:
                since[last] = since.get(last, 0) + 1
            else:
                self._to_next.observe(max(0.0, now - last) / count, count)
        self._generation_tokens += generated
        for last, times in since.items():
            self._to_next.observe(max(0.0, now - last), times)

    def on_finish(self, request: Request) -> None:
        """Count the request, and forget it."""
        self._finished[request.finish_reason or "unknown"] += 1
        tracked = self._requests.pop(request.request_id, None)
        self._in_prefill.pop(request.request_id, None)
        if tracked is None:
            return
        # A step may give more tokens than the request takes: those behind its end were counted above. It is the
        # same call of the loop that counts and corrects, so nobody sees a counter go back.
        self._generation_tokens += request.num_output_tokens - tracked.generated
        if request.num_output_tokens:
            self._count_prompt(tracked, request.num_prompt_tokens)
        for name, value in self._life(tracked).items():
            self._histograms[name].observe(value)

    def _life(self, tracked: _Tracked) -> Mapping[str, float]:
        """Return what a request that ended came to, by histogram."""
        request, now = tracked.request, self._clock()
        arrival, generated = request.arrival_time, request.num_output_tokens
        answers = request.stash.get(NUM_ANSWERS)
        ran = request.scheduled_time is not None
        started = request.scheduled_time or now
        first = tracked.first_token or now
        values: dict[str, float] = {
            "e2e_request_latency_seconds": now - arrival,
            "request_queue_time_seconds": started - arrival,
            "request_prefill_time_seconds": first - started,
            "request_decode_time_seconds": now - first,
            "request_inference_time_seconds": now - started,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": generated,
            "request_max_num_generation_tokens": generated,
            "request_params_n": answers or 1,
            "request_num_preemptions": request.num_preemptions,
            "request_prefill_kv_computed_tokens": request.num_prompt_tokens - request.num_cached
            if ran
            else 0,
        }
        if request.params.max_tokens is not None:
            values["request_params_max_tokens"] = request.params.max_tokens
        if generated > 1:
            between = (tracked.last_token - tracked.first_token) / (generated - 1)
            values["request_time_per_output_token_seconds"] = between
        return {name: max(0.0, value) for name, value in values.items()}

    def metrics(self) -> Mapping[str, float]:
        """Series by Prometheus name."""
        told: dict[str, float] = {
            "num_steps": self._steps,
            "iteration_requests_total": self._step_requests,
            "iteration_requests_max": self._max_step_requests,
            "prompt_tokens": self._prompt_tokens,
            "prompt_tokens_cached": self._cached_tokens,
            "generation_tokens": self._generation_tokens,
        }
        for why, count in self._finished.items():
            told[series_name("request_success", finished_reason=why)] = count
        for histogram in self._histograms.values():
            told.update(histogram.series())
        return told


class _Tracked:
    """A request that has not ended."""

    __slots__ = ("first_step", "first_token", "generated", "last_token", "prompt_counted", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.first_step = request.first_step
        self.prompt_counted = 0
        self.generated = 0
        self.first_token = self.last_token = 0.0
        """When its first and its last token came, on the clock; 0: there is none yet."""
