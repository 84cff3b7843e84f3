"""`headrace bench throughput | latency | startup`.

Figures go to standard output as text, and with --output-json to a file, with vLLM's key names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.datasets import Dataset
from headrace.cli.bench_dataset import dataset_flags
from headrace.cli.options import EngineArgs, engine_command
from headrace.cli.requests import emit, start_llm
from headrace.core.errors import ConfigError

__all__ = ["latency", "startup", "throughput"]

OutputJson = Annotated[
    Path | None,
    typer.Option("--output-json", metavar="FILE", help="Write all figures to this file.", show_default=False),
]
Detokenize = Annotated[
    bool, typer.Option("--disable-detokenize", help="Leave the way from ids to text out of the time.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Draws prompts and lengths.")]


@engine_command
@dataset_flags
def throughput(
    args: EngineArgs,
    dataset: Dataset,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", metavar="N", min=0, help="Requests that run before, untimed.")
    ] = 4,
    disable_detokenize: Detokenize = False,
    output_json: OutputJson = None,
) -> None:
    """Hand in many requests together, and tell requests and tokens a second.

    Decoding is greedy and end tokens are ignored: each request generates exactly as many tokens as it says.
    """
    from headrace.bench import measure
    from headrace.bench.facts import run_facts

    _check_writable(output_json)
    with start_llm(args) as llm:
        figures = measure.throughput(
            llm,
            dataset.make(measure.vocabulary(llm)),
            num_warmups=num_warmups,
            detokenize=not disable_detokenize,
            use_tqdm=sys.stderr.isatty(),
        )
        workload = {"dataset_name": dataset.name, **dataset.options, "num_warmups": num_warmups}
        results = {**figures, "workload": workload, **run_facts(llm.report)}
    emit(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total "
        f"tokens/s, {figures['output_tokens_per_second']:.2f} output tokens/s\n"
        f"{figures['num_requests']} requests in {figures['elapsed_time']:.2f} s: "
        f"{figures['total_input_tokens']} prompt tokens, {figures['num_cached_tokens']} of them cached, and "
        f"{figures['total_output_tokens']} output tokens; {figures['num_preemptions']} preemptions\n"
    )
    _tell_token_times(figures)
    _write(output_json, results)


@engine_command
def latency(
    args: EngineArgs,
    input_len: Annotated[
        int, typer.Option("--input-len", metavar="N", min=1, help="Tokens of a prompt, drawn at random.")
    ] = 32,
    output_len: Annotated[
        int, typer.Option("--output-len", metavar="N", min=1, help="Tokens to generate for each.")
    ] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Prompts.")] = 8,
    num_iters_warmup: Annotated[
        int, typer.Option("--num-iters-warmup", metavar="N", min=0, help="Runs before, untimed.")
    ] = 10,
    num_iters: Annotated[int, typer.Option("--num-iters", metavar="N", min=1, help="Runs.")] = 30,
    seed: Seed = 0,
    disable_detokenize: Detokenize = False,
    output_json: OutputJson = None,
) -> None:
    """Run one batch of prompts again and again, and tell how long it takes to its end.

    Decoding is greedy, end tokens are ignored, and the prefix cache is emptied before every run.
    """
    from headrace.bench import measure
    from headrace.bench.facts import run_facts
    from headrace.bench.workloads import random_requests
    from headrace.progress import counting

    _check_writable(output_json)
    with start_llm(args) as llm:
        requests = random_requests(
            batch_size,
            measure.vocabulary(llm).ids,
            input_len=input_len,
            output_len=output_len,
            seed=seed,
        )
        with counting(num_iters_warmup + num_iters, "runs") as tick:
            figures = measure.latency(
                llm,
                requests,
                num_iters_warmup=num_iters_warmup,
                num_iters=num_iters,
                detokenize=not disable_detokenize,
                tick=tick,
            )
        workload = {
            "input_len": input_len,
            "output_len": output_len,
            "batch_size": batch_size,
            "num_iters_warmup": num_iters_warmup,
            "seed": seed,
        }
        results = {**figures, "workload": workload, **run_facts(llm.report)}
    emit(
        f"Avg latency: {figures['avg_latency']:.4f} seconds "
        f"({figures['output_tokens_per_second']:.2f} output tokens/s)\n"
    )
    _tell_percentiles("latency", figures["percentiles"])
    _tell_token_times(figures)
    _write(output_json, results)


@engine_command
def startup(
    args: EngineArgs,
    input_len: Annotated[
        int, typer.Option("--input-len", metavar="N", min=1, help="Tokens of the prompt.")
    ] = 32,
    num_iters_warmup: Annotated[
        int, typer.Option("--num-iters-warmup", metavar="N", min=0, help="Starts before, untimed.")
    ] = 1,
    num_iters_warm: Annotated[int, typer.Option("--num-iters-warm", metavar="N", min=1, help="Starts.")] = 3,
    num_iters_cold: Annotated[
        int, typer.Option("--num-iters-cold", metavar="N", min=0, help="Starts that compile kernels anew.")
    ] = 0,
    output_json: OutputJson = None,
) -> None:
    """Start fresh processes, and tell how long each takes from the command to its first token, stage by stage."""
    from headrace.bench.startup import startup as measure_startup
    from headrace.models.opening import resolve_model
    from headrace.progress import counting, download_progress

    # What is asked for wrongly is said here and not by a process, and fetching a model shows its bar.
    started = args.start()
    _check_writable(output_json)
    with download_progress() as progress:
        resolve_model(started.config.model, started.plugins.registry, progress)
    with counting(num_iters_cold + num_iters_warmup + num_iters_warm, "starts") as tick:
        figures = measure_startup(
            args.model,
            args.file,
            args.flags,
            prompt_len=input_len,
            num_iters_warmup=num_iters_warmup,
            num_iters=num_iters_warm,
            num_iters_cold=num_iters_cold,
            tick=tick,
        )
    stages = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in figures["stages"].items())
    emit(f"Avg time to first token: {figures['avg_time_to_first_token']:.2f} seconds: {stages}\n")
    _tell_percentiles("time to first token", figures["time_to_first_token_percentiles"])
    if num_iters_cold:
        emit(
            f"Avg time of the engine's stage: {figures['avg_cold_startup_time']:.2f} seconds cold, "
            f"{figures['avg_warm_startup_time']:.2f} warm\n"
        )
    _write(
        output_json, {**figures, "workload": {"input_len": input_len, "num_iters_warmup": num_iters_warmup}}
    )


def _tell_percentiles(what: str, percentiles: Mapping[str, float]) -> None:
    for percentage, seconds in percentiles.items():
        emit(f"{percentage}% percentile {what}: {seconds:.4f} seconds\n")


def _tell_token_times(figures: Mapping[str, Any]) -> None:
    """Times of single requests; those that generate one token have no time a token."""
    for name, text in (("ttft", "Time to first token"), ("tpot", "Time per output token")):
        values = [figures[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        if None not in values:
            emit("{}: mean {:.1f} ms, median {:.1f} ms, p99 {:.1f} ms\n".format(text, *values))


def _check_writable(path: Path | None) -> None:
    """Refuse before anything is measured what could not be written afterwards. Raises `ConfigError`."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(
            f"--output-json {path} cannot be written: it must be a file in a folder that exists",
            option="output_json",
        )


def _write(path: Path | None, results: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
