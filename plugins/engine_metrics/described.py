"""The names that this plugin tells series of, and the bounds of its histograms: vLLM's, so that dashboards fit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from headrace.core.metrics import Histogram, Metric

__all__ = ["DESCRIBED", "FINISH_REASONS", "histograms"]

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
"""Reasons that are counted from 0; a plugin's own appear once they happen."""

DESCRIBED: Mapping[str, Metric] = {
    "prompt_tokens": Metric("counter", "Prompt tokens taken in: computed, or found in the prefix cache."),
    "prompt_tokens_cached": Metric("counter", "Prompt tokens found in the prefix cache."),
    "generation_tokens": Metric("counter", "Tokens generated."),
    "request_success": Metric("counter", "Requests that ended, by reason."),
    "num_steps": Metric("counter", "Steps the engine made."),
    "iteration_requests_total": Metric("counter", "Requests in steps, summed over steps."),
    "iteration_requests_max": Metric("gauge", "Most requests that one step held."),
    "iteration_tokens_total": Metric("histogram", "Tokens computed in a step."),
    "time_to_first_token_seconds": Metric("histogram", "From arrival to the first token, in seconds."),
    "inter_token_latency_seconds": Metric(
        "histogram", "From one token of a request to the next, in seconds."
    ),
    "request_time_per_output_token_seconds": Metric(
        "histogram", "A request's mean time from one token to the next, in seconds."
    ),
    "e2e_request_latency_seconds": Metric("histogram", "From arrival to the end, in seconds."),
    "request_queue_time_seconds": Metric(
        "histogram", "From arrival to the first place in a step, in seconds."
    ),
    "request_prefill_time_seconds": Metric("histogram", "From there to the first token, in seconds."),
    "request_decode_time_seconds": Metric("histogram", "From the first token to the end, in seconds."),
    "request_inference_time_seconds": Metric("histogram", "Prefill and decode together, in seconds."),
    "request_prompt_tokens": Metric("histogram", "Prompt tokens of a request."),
    "request_generation_tokens": Metric("histogram", "Tokens generated for a request."),
    "request_max_num_generation_tokens": Metric("histogram", "Most tokens generated for one answer."),
    "request_params_n": Metric("histogram", "The parameter n of the request an answer belongs to."),
    "request_params_max_tokens": Metric("histogram", "The parameter max_tokens, where it is set."),
    "request_num_preemptions": Metric("histogram", "Times a request was preempted."),
    "request_prefill_kv_computed_tokens": Metric(
        "histogram", "Prompt tokens whose KV was computed: those of the prefix cache are not."
    ),
}

_TO_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TO_NEXT = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_LIFE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_BOUNDS: Mapping[str, Sequence[float]] = {
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "time_to_first_token_seconds": _TO_FIRST,
    "inter_token_latency_seconds": _TO_NEXT,
    "request_time_per_output_token_seconds": _TO_NEXT,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
}


def histograms(max_tokens: int) -> dict[str, Histogram]:
    """Make the histograms, by name.

    max_tokens: the longest request, as far as it is known; those over tokens have no bound beyond it.
    """
    return {
        name: Histogram(
            name, _BOUNDS.get(name) or (_LIFE if name.endswith("_seconds") else _up_to(max_tokens))
        )
        for name, metric in DESCRIBED.items()
        if metric.kind == "histogram"
    }


def _up_to(limit: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, as far as `limit`."""
    bounds = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return list(itertools.takewhile(lambda bound: bound <= limit, bounds))
