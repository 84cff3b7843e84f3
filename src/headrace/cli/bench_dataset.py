"""Which workload to run, as flags of a command; their names are those of vLLM's benchmarks."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.datasets import prepare_dataset

__all__ = ["dataset_flags"]

PANEL = "Workload"

NAME = (
    "workload (a JSON list of prompt_ids and max_tokens), sharegpt, random or prefix_repetition; default: workload "
    "where a path is given, else random."
)
HELP: dict[str, tuple[type, str, str]] = {
    "dataset_path": (Path, "FILE", "The file of workload and sharegpt."),
    "num_prompts": (int, "N", "Prompts to make up (default: 100), or at most so many of the file."),
    "input_len": (int, "N", "random: prompt tokens (default: 1024)."),
    "output_len": (
        int,
        "N",
        "random: output tokens (default: 128); workload, sharegpt: instead of the file's.",
    ),
    "range_ratio": (float, "R", "random: lengths vary by this share, up and down (default: 0)."),
    "prefix_len": (int, "N", "random: more tokens, with which all prompts begin (default: 0)."),
    "prefix_repetition_prefix_len": (int, "N", "prefix_repetition: tokens of a prefix (default: 256)."),
    "prefix_repetition_suffix_len": (int, "N", "prefix_repetition: tokens behind it (default: 256)."),
    "prefix_repetition_num_prefixes": (int, "N", "prefix_repetition: prefixes (default: 10)."),
    "prefix_repetition_output_len": (int, "N", "prefix_repetition: output tokens (default: 128)."),
}
"""By option: its type, what the help shows for the value, and its line."""

ALSO = {
    "input_len": "--random-input-len",
    "output_len": "--random-output-len",
    "range_ratio": "--random-range-ratio",
    "prefix_len": "--random-prefix-len",
}
"""vLLM's other spellings."""


def dataset_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags that choose and shape its parameter `dataset`, a `Dataset`.

    What is asked for wrongly raises `ConfigError` before the command begins.
    """

    def command(*args: Any, **values: Any) -> None:
        given = {option: values.pop(option) for option in HELP}
        values["dataset"] = prepare_dataset(
            values.pop("dataset_name"),
            given,
            num_prompts=given.pop("num_prompts"),
            seed=values.pop("seed"),
        )
        function(*args, **values)

    hints = typing.get_type_hints(function, include_extras=True)
    flags = [
        _flag("dataset_name", str, "NAME", NAME),
        *(_flag(option, *facts) for option, facts in HELP.items()),
        _flag("seed", int, "N", "Draws prompts and lengths.", default=0),
    ]
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "dataset":
            parameters += flags
        else:
            kind = inspect.Parameter.KEYWORD_ONLY if parameters[1:] else parameter.kind
            parameters.append(parameter.replace(annotation=hints.get(name, str), kind=kind))
    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _flag(option: str, kind: type, metavar: str, help: str, default: Any = None) -> inspect.Parameter:
    spellings = ["--" + option.replace("_", "-"), *([ALSO[option]] if option in ALSO else [])]
    least = 0 if option in ("prefix_len", "seed") else 1
    info: Any = typer.Option(
        *spellings,
        metavar=metavar,
        help=help,
        rich_help_panel=PANEL,
        show_default=default is not None,
        min=least if kind is int else None,
    )
    return inspect.Parameter(
        option,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )
