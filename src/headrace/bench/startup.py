"""How long a start takes: fresh processes, from the command to the first token, stage by stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.bench.facts import mean, percentiles
from headrace.core.errors import EngineError
from headrace.core.folders import cache_folder

__all__ = ["STAGES", "startup"]

STAGES = ("interpreter", "imports", "engine", "first_token")
"""Python itself; torch and our modules; configuration, plugins, weights and memory; a prompt and its first token."""

KERNELS = "kernels"
"""What native backends call their folder below the cache folder."""

CHILD = "import time; running = time.monotonic(); from headrace.bench.first_token import main; main(running)"


def startup(
    model: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    *,
    prompt_len: int,
    num_iters_warmup: int,
    num_iters: int,
    num_iters_cold: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Start again and again; return the seconds of each start, with the facts of the last (`run_facts`).

    model, file, flags: what `start_configuration` is given, in values that JSON can hold.
    prompt_len: tokens of the prompt.
    num_iters_warmup: starts before, untimed: they fetch, compile, and bring files into memory.
    num_iters_cold: starts before those, each with no compiled kernels in the cache folder.
    Raises `EngineError` where a process failed.
    """
    asked = {
        "model": model,
        "file": None if file is None else str(file),
        "flags": {"show_report": False, **flags},
        "prompt_len": prompt_len,
    }
    cold = []
    for _ in range(num_iters_cold):
        with _without_kernels() as folder:
            cold.append(_start(json.dumps(asked), HEADRACE_CACHE=str(folder))[0])
        tick()
    starts = []
    for index in range(num_iters_warmup + num_iters):
        stages, facts = _start(json.dumps(asked))
        if index >= num_iters_warmup:
            starts.append(stages)
        tick()
    total = [sum(start.values()) for start in starts]
    return {
        **(_engine_times("cold", cold) if cold else {}),
        **_engine_times("warm", starts),
        "avg_time_to_first_token": mean(total),
        "times_to_first_token": total,
        "time_to_first_token_percentiles": percentiles(total),
        "stages": {stage: mean([start[stage] for start in starts]) for stage in STAGES},
        **facts,
    }


def _engine_times(kind: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return vLLM's names for what it measures: an engine put together in a process that has imported everything."""
    seconds = [start["engine"] for start in starts]
    return {
        f"avg_{kind}_startup_time": mean(seconds),
        f"{kind}_startup_times": seconds,
        f"{kind}_startup_percentiles": percentiles(seconds),
    }


@contextmanager
def _without_kernels() -> Iterator[Path]:
    """Yield a cache folder that holds what the user's holds, by links, but no compiled kernels."""
    own = cache_folder().absolute()
    with tempfile.TemporaryDirectory(prefix="headrace-cold-") as name:
        folder = Path(name)
        for entry in own.iterdir() if own.is_dir() else ():
            if entry.name != KERNELS:
                (folder / entry.name).symlink_to(entry)
        yield folder


def _start(asked: str, **environment: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Run one process; return the seconds of each stage, and what the process tells of itself."""
    before = time.monotonic()
    # -P: a folder here that is called like a package must not come before it.
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD],
        input=asked,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise EngineError(f"a start ended with status {done.returncode}: {lines[-1].removeprefix('error: ')}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = {}
    for stage in STAGES:
        seconds[stage] = told["moments"][stage] - before
        before = told["moments"][stage]
    return seconds, told["facts"]
