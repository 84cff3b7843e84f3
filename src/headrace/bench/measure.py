"""A started engine against the clock: throughput of many requests, latency of one batch.

Decoding is greedy and goes on behind end tokens, so that the same work is done whatever the model says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.datasets import Vocabulary
from headrace.bench.facts import mean, percentile, percentiles
from headrace.bench.workloads import BenchRequest
from headrace.core.errors import ConfigError, EngineError
from headrace.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM
    from headrace.outputs import RequestOutput

__all__ = ["check_lengths", "latency", "throughput", "vocabulary"]

Tick = Callable[[], None]


def vocabulary(llm: LLM) -> Vocabulary:
    """Return the ids of the model that stand for text, and its tokenizer."""
    tokenizer = llm.front.tokenizer
    special = tokenizer.special_ids if tokenizer else frozenset()
    return Vocabulary([i for i in range(llm.front.vocab_size) if i not in special], llm.encode)


def check_lengths(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Refuse requests that the engine would end early. Raises `ConfigError`."""
    for index, request in enumerate(requests):
        total = len(request.prompt_token_ids) + request.max_tokens
        if total > max_model_len:
            raise ConfigError(
                f"request {index} has {len(request.prompt_token_ids)} prompt and {request.max_tokens} output tokens, "
                f"{total} together, and max_model_len is {max_model_len}; make it shorter, or start with a larger "
                "max_model_len",
                option="max_model_len",
            )


def throughput(
    llm: LLM,
    requests: Sequence[BenchRequest],
    *,
    num_warmups: int = 0,
    detokenize: bool = True,
    use_tqdm: bool = False,
) -> dict[str, Any]:
    """Hand in all requests together and return the figures.

    num_warmups: so many of the requests run before, untimed; the prefix cache is emptied between.
    Raises `ConfigError` for requests that are too long, and `EngineError` where one failed.
    """
    check_lengths(requests, llm.front.max_model_len)
    if num_warmups:
        _run(llm, requests[:num_warmups], detokenize=detokenize)
        llm.reset_prefix_cache()
    started = time.perf_counter()
    outputs = _run(llm, requests, detokenize=detokenize, use_tqdm=use_tqdm)
    elapsed = time.perf_counter() - started
    inputs = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": inputs + generated,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (inputs + generated) / elapsed,
        "total_input_tokens": inputs,
        "total_output_tokens": generated,
        "output_tokens_per_second": generated / elapsed,
        **_spread("ttft", _first_token_seconds(outputs)),
        **_spread("tpot", _seconds_a_token(outputs)),
        "num_preemptions": sum(output.metrics.num_preemptions for output in outputs),
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
    }


def latency(
    llm: LLM,
    requests: Sequence[BenchRequest],
    *,
    num_iters_warmup: int,
    num_iters: int,
    detokenize: bool = True,
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Run one batch again and again and return how long each run took, in seconds.

    The prefix cache is emptied before each, or only the first would compute the prompts.

    tick: called after every run, warm-ups included.
    Raises as `throughput` does.
    """
    check_lengths(requests, llm.front.max_model_len)
    seconds: list[float] = []
    for index in range(num_iters_warmup + num_iters):
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = _run(llm, requests, detokenize=detokenize)
        if index >= num_iters_warmup:
            seconds.append(time.perf_counter() - started)
        tick()
    return {
        "avg_latency": mean(seconds),
        "std_latency": statistics.pstdev(seconds),
        "latencies": seconds,
        "percentiles": percentiles(seconds),
        "output_tokens_per_second": sum(request.max_tokens for request in requests) / mean(seconds),
        # Of the last run; they hardly differ.
        **_spread("ttft", _first_token_seconds(outputs)),
        **_spread("tpot", _seconds_a_token(outputs)),
    }


def _run(
    llm: LLM, requests: Sequence[BenchRequest], *, detokenize: bool, use_tqdm: bool = False
) -> list[RequestOutput]:
    # What a model's own defaults might set is set here, so that they change nothing.
    params = SamplingParams(
        temperature=0,
        ignore_eos=True,
        detokenize=detokenize,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
    outputs = llm.generate(
        [request.prompt_token_ids for request in requests],
        [params.model_copy(update={"max_tokens": request.max_tokens}) for request in requests],
        use_tqdm=use_tqdm,
    )
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise EngineError(
            f"{len(failed)} of {len(outputs)} requests failed, so there is no figure; the first: {failed[0].error}"
        )
    return outputs


def _first_token_seconds(outputs: Sequence[RequestOutput]) -> list[float]:
    return [value for output in outputs if (value := output.metrics.time_to_first_token) is not None]


def _seconds_a_token(outputs: Sequence[RequestOutput]) -> list[float]:
    """Of each answer, the time from its first token to its last, by the number of tokens after the first."""
    return [
        output.metrics.decode_time / (len(output.outputs[0].token_ids) - 1)
        for output in outputs
        if output.metrics.decode_time is not None and len(output.outputs[0].token_ids) > 1
    ]


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Milliseconds by vLLM's names; None where no request gave one."""
    scaled = [1000 * value for value in seconds]
    return {
        f"mean_{name}_ms": mean(scaled) if scaled else None,
        f"median_{name}_ms": percentile(scaled, 50) if scaled else None,
        f"p99_{name}_ms": percentile(scaled, 99) if scaled else None,
    }
