"""What every engine's run has in common: load, warm up, one stream, the whole workload; figures as JSON.

    python run_NAME.py MODEL WORKLOAD.json --output FIGURES.json [--repeat 3]

An engine's script has one function, `load`, which returns a function from requests to the number of tokens generated
for each. Decoding is greedy and goes on behind the end token, so that every engine generates exactly the same number
of tokens; a run that did not is an error and not a figure. Only the standard library is used here: each engine has an
environment of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Request", "main", "measure", "read_workload"]

WARM_UP_REQUESTS = 4
SINGLE_PROMPT, SINGLE_OUTPUT = 64, 128
"""Tokens of the run with one stream."""


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and by how many."""

    prompt_ids: list[int]
    max_tokens: int


Run = Callable[[Sequence[Request]], Sequence[int]]
"""Runs requests, as many at once as the engine can; returns how many tokens it generated for each."""


def read_workload(path: Path) -> list[Request]:
    """Read a workload."""
    return [Request(item["prompt_ids"], item["max_tokens"]) for item in json.loads(path.read_text())]


def measure(
    load: Callable[[], Run], requests: Sequence[Request], *, repeat: int, batches: bool = True
) -> dict[str, Any]:
    """Return the figures: `load_s`, and a list with one entry a repetition of `single_tok_s` and `mixed_tok_s`.

    load_s: seconds from before the engine's package is imported until it can answer.
    single_tok_s, mixed_tok_s: output tokens a second, of one stream and of all requests handed in together.
    batches: False for an engine that runs one stream only; `mixed_tok_s` is empty then.
    """
    started = time.perf_counter()
    run = load()
    load_s = time.perf_counter() - started
    prompt = next(r.prompt_ids for r in requests if len(r.prompt_ids) >= SINGLE_PROMPT)[:SINGLE_PROMPT]
    single = [Request(prompt, SINGLE_OUTPUT)]
    _rate(run, requests[:WARM_UP_REQUESTS] if batches else [Request(prompt, 16)])
    return {
        "load_s": load_s,
        "single_tok_s": [_rate(run, single) for _ in range(repeat)],
        "mixed_tok_s": [_rate(run, requests) for _ in range(repeat)] if batches else [],
    }


def _rate(run: Run, requests: Sequence[Request]) -> float:
    started = time.perf_counter()
    counts = list(run(requests))
    seconds = time.perf_counter() - started
    wanted = [request.max_tokens for request in requests]
    if counts != wanted:
        raise RuntimeError(f"the engine generated {counts} tokens instead of {wanted}: nothing to compare")
    return sum(counts) / seconds


def main(load: Callable[[str], Run], *, package: str, weights: str, batches: bool = True) -> None:
    """Measure the engine that the command line names a model for, and write the figures.

    package: the distribution whose version is told.
    weights: the format in which the engine keeps its weights.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("workload", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    figures = measure(
        lambda: load(arguments.model),
        read_workload(arguments.workload),
        repeat=arguments.repeat,
        batches=batches,
    )
    version = importlib.metadata.version(package)
    arguments.output.write_text(json.dumps({"version": version, "weights": weights, **figures}))
