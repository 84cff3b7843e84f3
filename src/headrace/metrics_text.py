"""Figures of an engine as text for Prometheus, in its own format or in OpenMetrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics_format
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from headrace.core.metrics import Metric

__all__ = ["exposition"]

PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Key = tuple[str, tuple[tuple[str, str], ...]]
"""What Prometheus knows a sample by: its name, and its labels in order."""

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)', re.DOTALL)
_ENDS = ("_bucket", "_sum", "_count")
"""Of the series of a histogram, in the order they are written."""


def exposition(
    series: Mapping[str, float],
    described: Mapping[str, Metric],
    *,
    prefix: str,
    labels: Mapping[str, str],
    openmetrics: bool,
) -> tuple[bytes, str]:
    """Return the text and its content type.

    series: as `EngineListener.metrics` tells them, see `headrace.core.metrics`. What no plugin described is a gauge.
    prefix: published before each name, with a colon.
    labels: put on every series; one that has a label of such a name keeps its own.
    openmetrics: whether the reader asked for `application/openmetrics-text`.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(_families(series, described, prefix, labels)))
    if not openmetrics:
        return generate_latest(registry), PLAIN_TEXT
    # Names are legal as they are; other ways of escaping would take the colon out of samples and not of families.
    text = openmetrics_format.generate_latest(registry, escaping=openmetrics_format.ALLOWUTF8)
    return text, openmetrics_format.CONTENT_TYPE_LATEST


class _Collector(Collector):
    """Gives a registry families that are made already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> list[Family]:
        return self._families


def _families(
    series: Mapping[str, float], described: Mapping[str, Metric], prefix: str, labels: Mapping[str, str]
) -> Iterator[Family]:
    """Gather series by what they belong to; of two that are one to Prometheus, the later counts.

    What is described and has no series is there as well, without a sample: readers see every name from the start.
    """
    families: dict[str, Family] = {}
    samples: dict[str, dict[Key, float]] = {}

    def family_of(stem: str, metric: Metric) -> str:
        full = f"{prefix}:{stem}"
        if full not in families:
            families[full] = Family(full, metric.help, metric.kind)
            samples[full] = {}
        return full

    for name, value in series.items():
        base, own = _parse(name)
        stem, end, metric = _belongs_to(base, described)
        full = family_of(stem, metric)
        if end == "_bucket":
            own["le"] = floatToGoString(float(own.get("le", "+Inf")))
        samples[full][full + end, tuple(sorted({**labels, **own}.items()))] = value
    for name, metric in described.items():
        family_of(name.removesuffix("_total") if metric.kind == "counter" else name, metric)
    for full, family in families.items():
        told = list(samples[full].items())
        if family.type == "histogram":
            told = _in_order(told, full)
        for (sample, pairs), value in told:
            family.add_sample(sample, dict(pairs), value)
        yield family


def _belongs_to(base: str, described: Mapping[str, Metric]) -> tuple[str, str, Metric]:
    """Return a family's name, what stands behind it in the sample's, and what the family is."""
    metric = described.get(base)
    if metric is not None and metric.kind == "counter":
        return base.removesuffix("_total"), "_total", metric
    if metric is not None:
        return base, "", metric
    for end in _ENDS:
        metric = described.get(base.removesuffix(end))
        if base.endswith(end) and metric is not None and metric.kind == "histogram":
            return base.removesuffix(end), end, metric
    return base, "", Metric("gauge", "A figure that nobody described.")


def _parse(series: str) -> tuple[str, dict[str, str]]:
    """Return name and labels; a series that is not well formed is a name as a whole, as far as names allow."""
    match = _SERIES.fullmatch(series)
    labels: dict[str, str] = {}
    if match is not None:
        text, at = match[2] or "", 0
        while pair := _LABEL.match(text, at):
            labels[pair[1]] = re.sub(r"\\(.)", _unescaped, pair[2], flags=re.DOTALL)
            at = pair.end()
        if at == len(text):
            return match[1], labels
    return re.sub(r"[^a-zA-Z0-9_:]", "_", series), {}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _in_order(told: list[tuple[Key, float]], full: str) -> list[tuple[Key, float]]:
    """Sort a histogram's samples: those of one set of labels together, their buckets by rising bounds."""

    def key(item: tuple[Key, float]) -> tuple[object, ...]:
        (sample, pairs), _ = item
        others = [pair for pair in pairs if pair[0] != "le"]
        end = sample.removeprefix(full)
        return others, _ENDS.index(end) if end in _ENDS else -1, float(dict(pairs).get("le", 0))

    return sorted(told, key=key)
