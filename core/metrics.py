"""Metrics: what a series is called and counts, and a histogram to count with.

Parts tell figures as a flat mapping from a series to a number (`EngineListener.metrics`): `num_requests_running`,
`request_success{finished_reason="stop"}`; a histogram is a series a bucket, `NAME_bucket{le="0.1"}`, with `NAME_sum`
and `NAME_count`. What kind of thing NAME is, and what it means, is registered once with `registrar.metric`; a series
nobody described is published as a gauge. Whoever publishes adds the prefix, and `_total` to counters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Histogram", "Metric", "series_name"]


@dataclass(frozen=True)
class Metric:
    """What a name stands for."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    """One line."""


def series_name(name: str, **labels: str) -> str:
    """Return `name{label="value"}`, values escaped as Prometheus does it: they may hold anything."""
    if not labels:
        return name
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Histogram:
    """Counts observations by bucket, as Prometheus defines it: a bucket holds what is at most its bound.

    Parameters
    ----------
    name: of the metric.
    buckets: upper bounds, rising; one without bound is added.
    """

    def __init__(self, name: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._bounds = tuple(buckets)
        bounds = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._names = [series_name(f"{name}_bucket", le=bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def series(self) -> Mapping[str, float]:
        """Return its series, buckets cumulative."""
        total = 0
        told: dict[str, float] = {}
        for name, count in zip(self._names, self._counts, strict=True):
            total += count
            told[name] = total
        told[f"{self._name}_sum"] = self._sum
        told[f"{self._name}_count"] = total
        return told
