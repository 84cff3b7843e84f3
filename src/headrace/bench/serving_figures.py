"""From the answers of a run to its figures, with vLLM's key names; every one can be made again from the details.

TTFT is the time to the first token, TPOT the time a token of those after the first, ITL the time between two chunks,
E2EL the time to the last token. A request that fails counts as failed and in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.facts import mean, percentile
from headrace.bench.load_options import METRICS
from headrace.bench.streams import Answer

if TYPE_CHECKING:
    from headrace.bench.serving import Run

__all__ = ["details", "figures", "output_rates"]


def figures(
    run: Run,
    *,
    goals: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentages: Sequence[float] = (99,),
) -> dict[str, Any]:
    """Return the figures of a run.

    goals: by name of `GOALS`, the most milliseconds that a good request takes; `request_goodput` is the rate of
        those that keep all, and None where no goal is set.
    metrics: of `METRICS`, those whose mean, median, standard deviation and percentiles are told; these are None
        where no request gave one.
    """
    good = [answer for answer in run.answers if not answer.error]
    inputs, outputs = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    kept = sum(_keeps(answer, goals or {}) for answer in good)
    found: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / run.duration,
        "request_goodput": kept / run.duration if goals else None,
        "output_throughput": outputs / run.duration,
        "total_token_throughput": (inputs + outputs) / run.duration,
        "max_output_tokens_per_s": max(output_rates(good), default=0.0),
        "max_concurrent_requests": _most_at_once(good),
        "client_cpu_s": run.client_cpu_s,
    }
    seconds = {
        "ttft": [answer.ttft for answer in good],
        "tpot": [_tpot(answer) for answer in good if answer.output_tokens > 1],
        "itl": [itl for answer in good for itl in answer.itls],
        "e2el": [answer.latency for answer in good],
    }
    for name in metrics:
        found |= _spread(name, [1000 * value for value in seconds[name]], percentages)
    return found


def details(run: Run) -> dict[str, list[Any]]:
    """Return what each request came to, in seconds and tokens: lists in the order of the requests."""
    answers = run.answers
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itls for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "start_times": [answer.start_time for answer in answers],
        "queue_times": [answer.queue_time for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def output_rates(answers: Sequence[Answer]) -> list[float]:
    """Return the output tokens of each second since the first request.

    A chunk counts as many as its answer has tokens a chunk: one, where chunks are tokens.

    answers: those that did not fail.
    """
    if not answers:
        return []
    start = min(answer.start_time for answer in answers)
    rates = [0.0] * (int(max(answer.times[-1] for answer in answers) - start) + 1)
    for answer in answers:
        share = answer.output_tokens / len(answer.times)
        for time in answer.times:
            rates[int(time - start)] += share
    return rates


def _most_at_once(answers: Sequence[Answer]) -> int:
    """How many were under way at once; one that ends when another begins makes room for it."""
    moments = [(answer.start_time, 1) for answer in answers]
    moments += [(answer.start_time + answer.latency, -1) for answer in answers]
    most = running = 0
    for _, change in sorted(moments):
        running += change
        most = max(most, running)
    return most


def _tpot(answer: Answer) -> float:
    """Seconds a token after the first; 0 for an answer of one."""
    return (answer.latency - answer.ttft) / (answer.output_tokens - 1) if answer.output_tokens > 1 else 0.0


def _keeps(answer: Answer, goals: Mapping[str, float]) -> bool:
    took = {"ttft": answer.ttft, "tpot": _tpot(answer), "e2el": answer.latency}
    return all(1000 * took[name] <= most for name, most in goals.items())


def _spread(name: str, values: Sequence[float], percentages: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds by vLLM's names."""
    if not values:
        told = ["mean", "median", "std", *(f"p{percentage:g}" for percentage in percentages)]
        return {f"{kind}_{name}_ms": None for kind in told}
    average = mean(values)
    variance = math.fsum((value - average) ** 2 for value in values) / len(values)
    return {
        f"mean_{name}_ms": average,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": math.sqrt(variance),
        **{f"p{percentage:g}_{name}_ms": percentile(values, percentage) for percentage in percentages},
    }
