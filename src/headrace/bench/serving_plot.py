"""A run of `bench serve` as a figure: how times are spread, and tokens and requests over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.serving_figures import output_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headrace.bench.streams import Answer

__all__ = ["write_plot"]


def write_plot(answers: Sequence[Answer], title: str, path: Path) -> None:
    """Draw the shares of TTFTs and ITLs below a time, output tokens a second, and requests under way.

    answers: those that did not fail, at least one.
    path: its ending, of `load_options.FORMATS`, is the format.
    Raises `ImportError` without matplotlib, and `OSError` where the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    _shares(panels[0][0], "time to first token", [answer.ttft for answer in answers])
    _shares(panels[0][1], "time between chunks", [itl for answer in answers for itl in answer.itls])
    rates = output_rates(answers)
    panels[1][0].stairs(rates, range(len(rates) + 1))
    _label(panels[1][0], "output tokens of each second", "s since the first request", "tokens")
    moments, running = _under_way(answers)
    panels[1][1].step(moments, running, where="post")
    _label(panels[1][1], "requests under way", "s since the first request", "requests")
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _shares(panel: Axes, title: str, seconds: Sequence[float]) -> None:
    """The share of values below a time, with the median and the 99th percentile marked."""
    _label(panel, title, "ms", "share below")
    if seconds:
        panel.ecdf([1000 * value for value in seconds])
        for share in (0.5, 0.99):
            panel.axhline(share, color="0.7", linestyle="--", linewidth=0.8)
        panel.set_xlim(left=0)


def _label(panel: Axes, title: str, x: str, y: str) -> None:
    panel.set_title(title)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_ylim(bottom=0)


def _under_way(answers: Sequence[Answer]) -> tuple[list[float], list[Any]]:
    start = min(answer.start_time for answer in answers)
    changes = sorted(
        change
        for answer in answers
        for change in ((answer.start_time - start, 1), (answer.start_time + answer.latency - start, -1))
    )
    running, counts = 0, []
    for _, change in changes:
        running += change
        counts.append(running)
    return [moment for moment, _ in changes], counts
