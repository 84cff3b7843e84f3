"""How long a start takes: fresh processes, from the command to the first token, stage by stage."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.bench.facts import mean, percentiles
from headrace.core.errors import EngineError

__all__ = ["STAGES", "startup"]

STAGES = ("interpreter", "imports", "engine", "first_token")
"""Python itself; torch and our modules; configuration, plugins, weights and memory; a prompt and its first token."""

CHILD = "import time; running = time.monotonic(); from headrace.bench.first_token import main; main(running)"


def startup(
    model: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    *,
    prompt_len: int,
    num_iters_warmup: int,
    num_iters: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Start again and again; return the seconds of each start, with the facts of the last (`run_facts`).

    model, file, flags: what `start_configuration` is given, in values that JSON can hold.
    prompt_len: tokens of the prompt.
    num_iters_warmup: starts before, untimed: they fetch, compile, and bring files into memory.
    Raises `EngineError` where a process failed.
    """
    asked = {
        "model": model,
        "file": None if file is None else str(file),
        "flags": {"show_report": False, **flags},
        "prompt_len": prompt_len,
    }
    starts = []
    for index in range(num_iters_warmup + num_iters):
        stages, facts = _start(json.dumps(asked))
        if index >= num_iters_warmup:
            starts.append(stages)
        tick()
    engine = [start["engine"] for start in starts]
    total = [sum(start.values()) for start in starts]
    return {
        # vLLM's names for what it measures: an engine put together in a process that has imported everything.
        "avg_warm_startup_time": mean(engine),
        "warm_startup_times": engine,
        "warm_startup_percentiles": percentiles(engine),
        "avg_time_to_first_token": mean(total),
        "times_to_first_token": total,
        "time_to_first_token_percentiles": percentiles(total),
        "stages": {stage: mean([start[stage] for start in starts]) for stage in STAGES},
        **facts,
    }


def _start(asked: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Run one process; return the seconds of each stage, and what the process tells of itself."""
    before = time.monotonic()
    # -P: a folder here that is called like a package must not come before it.
    done = subprocess.run([sys.executable, "-P", "-c", CHILD], input=asked, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise EngineError(f"a start ended with status {done.returncode}: {lines[-1].removeprefix('error: ')}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = {}
    for stage in STAGES:
        seconds[stage] = told["moments"][stage] - before
        before = told["moments"][stage]
    return seconds, told["facts"]
