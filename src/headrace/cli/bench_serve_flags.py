"""The flags of `headrace bench serve`, called as in vLLM's benchmark; those of workloads are in `bench_dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.load_options import BACKENDS

__all__ = [
    "ApiKey",
    "Backend",
    "BaseUrl",
    "Burstiness",
    "Concurrency",
    "Detailed",
    "Endpoint",
    "Goodput",
    "Host",
    "IgnoreEos",
    "Metrics",
    "Model",
    "MoreGoals",
    "OutputJson",
    "Percentages",
    "Plot",
    "Port",
    "Rate",
    "ResultFolder",
    "SaveResult",
    "Temperature",
    "VocabSize",
    "Warmups",
]


def _flag(panel: str, name: str, metavar: str, help: str, **rest: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, **rest)


def _switch(panel: str, name: str, help: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel)


def _optional(panel: str, name: str, metavar: str, help: str, **rest: Any) -> Any:
    return _flag(panel, name, metavar, help, show_default=False, **rest)


SERVER, LOAD, FIGURES = "Server", "Load", "Figures"

BaseUrl = Annotated[
    str | None, _optional(SERVER, "--base-url", "URL", "The server, instead of host and port.")
]
Host = Annotated[str, _flag(SERVER, "--host", "HOST", "The server's host.")]
Port = Annotated[int, _flag(SERVER, "--port", "N", "The server's port.", min=1, max=65535)]
Backend = Annotated[
    str, _flag(SERVER, "--backend", "|".join(BACKENDS), "Completions of token ids, or chats of text.")
]
Endpoint = Annotated[str | None, _optional(SERVER, "--endpoint", "PATH", "Instead of the backend's own.")]
Model = Annotated[
    str | None, _optional(SERVER, "--model", "NAME", "Default: the first that /v1/models names.")
]
ApiKey = Annotated[
    str | None, _optional(SERVER, "--api-key", "KEY", "Sent as a bearer token.", envvar="OPENAI_API_KEY")
]

VocabSize = Annotated[
    int | None,
    _optional(
        "Workload",
        "--random-vocab-size",
        "N",
        "Draw prompts that are made up from the ids below N; default: ids that the server's tokenizer gives.",
        min=1,
    ),
]

Rate = Annotated[float, _flag(LOAD, "--request-rate", "R", "Requests a second; inf sends all at once.")]
Burstiness = Annotated[
    float, _flag(LOAD, "--burstiness", "S", "How even gaps are: 1 is Poisson, inf a fixed beat.")
]
Concurrency = Annotated[
    int | None, _optional(LOAD, "--max-concurrency", "N", "Most requests that are out at once.", min=1)
]
Warmups = Annotated[int, _flag(LOAD, "--num-warmups", "N", "Requests that run before, untimed.", min=0)]
IgnoreEos = Annotated[bool, _switch(LOAD, "--ignore-eos", "Generate to the full length.")]
Temperature = Annotated[float, _flag(LOAD, "--temperature", "T", "0 is greedy.", min=0)]

Goodput = Annotated[
    list[str] | None,
    _optional(FIGURES, "--goodput", "NAME:MS ...", "Goals for ttft, tpot, e2el, such as ttft:200 tpot:50."),
]
MoreGoals = Annotated[list[str] | None, typer.Argument(metavar="[NAME:MS]", hidden=True)]
"""The words behind the first one of `--goodput`, which vLLM takes without repeating the flag."""
Metrics = Annotated[str, _flag(FIGURES, "--percentile-metrics", "NAME,...", "The times that are told.")]
Percentages = Annotated[str, _flag(FIGURES, "--metric-percentiles", "P,...", "Their percentiles.")]
OutputJson = Annotated[
    Path | None, _optional(FIGURES, "--output-json", "FILE", "Write all figures to this file.")
]
SaveResult = Annotated[
    bool, _switch(FIGURES, "--save-result", "Write them to a file named by backend, rate, model and date.")
]
ResultFolder = Annotated[Path, _flag(FIGURES, "--result-dir", "DIR", "Where that file is.")]
Detailed = Annotated[bool, _switch(FIGURES, "--save-detailed", "Write each request's times and text, too.")]
Plot = Annotated[
    Path | None,
    _optional(FIGURES, "--plot", "FILE.png", "Draw times, and tokens and requests over time."),
]
