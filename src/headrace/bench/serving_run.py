"""A benchmark of a server from its workload to its answers: warm-up, arrival times, load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from headrace.bench.arrivals import arrival_times
from headrace.bench.load_options import Traffic
from headrace.bench.payloads import body
from headrace.bench.serving import Load, Run, run_load
from headrace.bench.serving_requests import Target, to_prompts, warm_up_requests
from headrace.bench.workloads import BenchRequest
from headrace.core.errors import EngineError

__all__ = ["Progress", "measure"]

Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]
"""Given how many there are of what, it yields what is called after each."""


def measure(
    target: Target,
    url: str,
    requests: Sequence[BenchRequest],
    traffic: Traffic,
    *,
    seed: int,
    keep_chunks: bool,
    progress: Progress,
) -> Run:
    """Warm a server up and send it the requests.

    url: where they are sent.
    seed: draws the gaps between them.
    keep_chunks: whether texts are asked for afterwards.
    Raises `EngineError` where a warm-up fails, and `ConfigError` where text is needed and the server gives none.
    """

    def send(requests: Sequence[BenchRequest], times: Sequence[float], what: str) -> Run:
        prompts = to_prompts(requests, target)
        bodies = [body(target.api, target.model, prompt, traffic.body_options) for prompt in prompts]
        load = Load(url, target.server.headers, times, traffic.max_concurrency, keep_chunks)
        with progress(len(prompts), what) as tick:
            return run_load(load, prompts, bodies, tick=tick)

    if warm_ups := warm_up_requests(requests, traffic.num_warmups):
        answers = send(warm_ups, [0.0] * len(warm_ups), "warm-ups").answers
        if failed := [answer.error for answer in answers if answer.error]:
            raise EngineError(f"{len(failed)} of {len(answers)} warm-ups failed; the first: {failed[0]}")
    times = arrival_times(len(requests), traffic.request_rate, burstiness=traffic.burstiness, seed=seed)
    return send(requests, times, "requests")
