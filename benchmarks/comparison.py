"""What a comparison's figures look like to a reader: a table, and a plot with the floor as lines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["markdown", "write_plot"]

LOADS = {"single_tok_s": "one stream", "mixed_tok_s": "workload"}
HEADER = (
    "engine",
    "version",
    "weights",
    "load s",
    "one stream tok/s",
    "of floor",
    "workload tok/s",
    "of floor",
)
NONE = "–"


def markdown(results: Mapping[str, Any]) -> str:
    """Return the table: the floor, engines with figures, then those without, each with the reason."""
    floor = floor_rates(results)
    lines = [_line(HEADER), _line(["---"] * 3 + ["---:"] * 5)]
    lines += [_line(_floor_row(when, pages, rates)) for when, pages, rates in _floor_rows(results)]
    lines += [_line(_engine_row(row, floor)) for row in results["rows"] if "reason" not in row]
    lines += [
        _line([row["engine"], f"not measured: {row['reason']}", *[""] * 6])
        for row in results["rows"]
        if "reason" in row
    ]
    return "\n".join(lines) + "\n"


def floor_rates(results: Mapping[str, Any], pages: str = "plain") -> dict[str, float]:
    """Return the floor's tokens a second by load: the mean of before and after. Empty where it was not measured."""
    found = list(results["floor"].values())
    return {load: statistics.fmean(floor[pages][load] for floor in found) for load in LOADS} if found else {}


def _floor_rows(results: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, float]]]:
    return [
        (when, pages, floor[pages]) for when, floor in results["floor"].items() for pages in ("plain", "huge")
    ]


def _floor_row(when: str, pages: str, rates: Mapping[str, float]) -> list[str]:
    single, mixed = rates["single_tok_s"], rates["mixed_tok_s"]
    return [f"floor, {pages} pages, {when}", "", "bfloat16", "", f"{single:.0f}", "", f"{mixed:.0f}", ""]


def _engine_row(row: Mapping[str, Any], floor: Mapping[str, float]) -> list[str]:
    cells = [row["engine"], row["version"], row["weights"], f"{row['load_s']:.1f}"]
    for load in LOADS:
        cells += _rate_cells(row[load], floor.get(load))
    return cells


def _rate_cells(values: Sequence[float], floor: float | None) -> list[str]:
    """The median, with the range where there is one, and its share of the floor."""
    if not values:
        return [NONE, NONE]
    median = statistics.median(values)
    spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
    return [f"{median:.0f}{spread}", f"{median / floor:.0%}" if floor else NONE]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw bars of all engines that have figures, and the floor as lines. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in results["rows"] if "reason" not in row]
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for panel, (load, title) in zip(panels, LOADS.items(), strict=True):
        rows = [row for row in measured if row[load]]
        panel.bar(
            [f"{row['engine']}\n{row['weights']}" for row in rows],
            [statistics.median(row[load]) for row in rows],
            color=["tab:blue" if row["engine"] == "headrace" else "0.6" for row in rows],
        )
        for pages, style in (("plain", "-"), ("huge", "--")):
            if floor := floor_rates(results, pages):
                panel.axhline(
                    floor[load], color="black", linestyle=style, label=f"floor, {pages} pages, bfloat16"
                )
        panel.set_title(title)
        panel.set_ylabel("output tokens a second")
        panel.tick_params(axis="x", rotation=30)
    if results["floor"]:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    machine = results["machine"]
    notes = [f"{machine['processor']}, {machine['cores_allowed']} cores; {results['date'][:10]}"]
    notes += [
        f"not measured: {row['engine']}: {row['reason']}"[:160] for row in results["rows"] if "reason" in row
    ]
    figure.suptitle("\n".join(notes), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
