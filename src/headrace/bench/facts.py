"""What must be told beside a figure: the machine, the engine, and how figures spread."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.report import StartupReport

__all__ = [
    "PERCENTAGES",
    "client_facts",
    "engine_facts",
    "machine_facts",
    "mean",
    "percentile",
    "percentiles",
    "run_facts",
]

PERCENTAGES = (10, 25, 50, 75, 90, 99)
"""Those that vLLM's benchmarks tell."""

ENGINE_FACTS = (
    "architecture",
    "parameters",
    "weights_bytes",
    "dtype",
    "device",
    "threads",
    "workers",
    "attention_backend",
    "op_sets",
    "row_invariant",
    "fingerprint",
)
"""What is told of an executor's report."""


def machine_facts() -> dict[str, Any]:
    """Return processor, cores, memory in bytes and the versions that matter."""
    import psutil

    from headrace.executors.process import choose_threads

    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "cores_allowed": choose_threads(environ={}).count,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def engine_facts(report: StartupReport) -> dict[str, Any]:
    """Return what was started, in plain values: model, types, backend, limits."""
    return {
        **{name: report.executor.get(name) for name in ENGINE_FACTS},
        "max_model_len": report.max_model_len,
        "max_num_seqs": report.max_num_seqs,
        "max_num_batched_tokens": report.max_num_batched_tokens,
        "prefix_caching": report.prefix_caching,
        "block_size": report.block_size,
        "num_kv_blocks": report.num_blocks,
        "kv_cache_bytes": report.kv_bytes,
        "plugins": report.plugins,
        "load_seconds": report.seconds,
    }


def client_facts() -> dict[str, Any]:
    """Return what every result tells beside its figures."""
    return {
        "headrace": version("headrace"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
    }


def run_facts(report: StartupReport) -> dict[str, Any]:
    """Return what every result of a started engine tells beside its figures."""
    return {**client_facts(), "model": report.model, "engine": engine_facts(report)}


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of at least one value."""
    return sum(values) / len(values)


def percentile(values: Sequence[float], percentage: float) -> float:
    """Return a percentile of at least one value, interpolated linearly between the two nearest, as numpy does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentage / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the `PERCENTAGES`, by their number as text: JSON has no other keys."""
    return {str(percentage): percentile(values, percentage) for percentage in PERCENTAGES}
