"""Sampling parameters as flags: made once from the fields of `SamplingParams`, for every command that asks a model.

    @engine_command
    @sampling_flags
    def generate(args: EngineArgs, sampling: Sampling, …) -> None:
        params = sampling.params()

Only flags that were given are passed on, so that defaults stand in one place. Text that does not fit a flag's type
is passed on, too: `SamplingParams` refuses it in its own words.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from headrace.cli.flags import flag_names
from headrace.core.errors import RequestError
from headrace.core.sampling_params import SamplingParams

__all__ = ["HELP", "Sampling", "sampling_flags"]

HELP = {
    "max_tokens": "Most tokens of an answer.",
    "min_tokens": "Tokens before which an answer does not end.",
    "temperature": "0 to 2; 0 always takes the likeliest token.",
    "top_p": "Sample from the likeliest tokens that together have this probability.",
    "top_k": "Sample from this many likeliest tokens; 0: all.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "seed": "Makes sampling repeatable.",
    "n": "Answers for one prompt.",
    "stop": "Text that ends an answer; may be repeated.",
    "stop_token_ids": "Token id that ends an answer; may be repeated.",
    "include_stop_str_in_output": "Show the text that ended the answer.",
    "ignore_eos": "Go on behind the model's end token.",
    "presence_penalty": "-2 to 2, against tokens that were generated before.",
    "frequency_penalty": "-2 to 2, against tokens by how often they were generated.",
    "repetition_penalty": "Above 1 against tokens of prompt and answer.",
    "logit_bias": "Added to logits: a JSON object of token ids and numbers.",
    "logprobs": "Likeliest tokens to tell with every token of the answer; with --json.",
    "prompt_logprobs": "The same for the prompt; with --json.",
    "logprob_token_ids": "Token id to tell the probability of with every token; may be repeated; with --json.",
    "logprobs_mode": "Of what logprobs are told: raw, the model's; processed, those tokens are drawn from.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put a space between special tokens that are shown.",
}
"""By field, in the order of the help. `detokenize` is left out: a command's answer is text."""

IDS = ("stop_token_ids", "logprob_token_ids")
"""Lists of numbers."""

PANEL = "Sampling"


@dataclass(frozen=True)
class Sampling:
    """The sampling flags of one call."""

    given: dict[str, Any] = field(default_factory=dict)
    """By field of `SamplingParams`, or by name of a plugin's request option; only those given."""

    def params(self, **defaults: Any) -> SamplingParams:
        """Return the parameters. defaults: fields to set where no flag does. Raises `RequestError`."""
        return SamplingParams(**{**defaults, **self.given})

    def check_shown(self, as_json: bool) -> None:
        """Refuse what would be computed and not shown. Raises `RequestError`."""
        for name in ("logprobs", "prompt_logprobs", "logprob_token_ids"):
            if name in self.given and not as_json:
                raise RequestError(f"{flag_names(name)} is shown with --json only; add it", param=name)


def sampling_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command whose second parameter is a `Sampling` one flag a field, and `--option`."""

    def command(args: Any, **values: Any) -> None:
        flags = {name: values.pop(name) for name in HELP}
        function(args, Sampling(_given(flags, values.pop("option") or [])), **values)

    hints = typing.get_type_hints(function, include_extras=True)
    first, _, *own = [
        parameter.replace(annotation=hints.get(name, str), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    parameters = [
        first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *own,
        *(_flag(name) for name in HELP),
        _parameter(
            "option",
            list[str] | None,
            typer.Option(
                "--option",
                metavar="NAME=JSON",
                help="Request option of a plugin; may be repeated.",
                rich_help_panel=PANEL,
                show_default=False,
            ),
        ),
    ]
    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _flag(name: str) -> inspect.Parameter:
    kind, info = _kind(name), SamplingParams.model_fields[name]
    default = info.get_default(call_default_factory=False)
    shown = "" if default in (None, False) or kind is list else f" (default: {str(default).lower()})"
    if name == "max_tokens":
        shown = ""  # each command has its own
    declared: Any = {bool: bool | None, list: list[str] | None}.get(kind, str | None)
    metavar = {bool: None, dict: "JSON", list: "N" if name in IDS else "TEXT", str: "TEXT"}.get(kind, "N")
    option = typer.Option(
        flag_names(name, boolean=kind is bool),
        metavar=metavar,
        help=HELP[name] + shown,
        rich_help_panel=PANEL,
        show_default=False,
    )
    return _parameter(name, declared, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _kind(name: str) -> type:
    """Return bool, int, float, list, dict or, for a choice of words, str: what a field holds, besides None."""
    annotation = SamplingParams.model_fields[name].annotation
    members = [m for m in typing.get_args(annotation) or (annotation,) if m is not type(None)]
    for member in (annotation, *members):
        origin = typing.get_origin(member) or member
        if origin is typing.Literal:
            return str
        if origin in (bool, int, float, list, dict):
            return typing.cast(type, origin)
    raise TypeError(f"no flag can be made of the field {name}: {annotation}")


def _given(flags: dict[str, Any], options: Sequence[str]) -> dict[str, Any]:
    given = {name: _value(name, value) for name, value in flags.items() if value not in (None, [])}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RequestError(f"--option must be NAME=JSON, got {text!r:.100}", param="option")
        name = name.replace("-", "_")
        if name in HELP:
            raise RequestError(
                f"--option is for options of plugins; {name} has its own flag {flag_names(name)}", param=name
            )
        if name in given:
            raise RequestError(f"--option {name} is given twice; keep one", param=name)
        given[name] = _json(f"--option {name}", value)
    return given


def _value(name: str, value: Any) -> Any:
    kind = _kind(name)
    if kind is dict:
        return _json(flag_names(name), value)
    if name in IDS:
        return [_number(int, text) for text in value]
    return _number(kind, value) if kind in (int, float) else value


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"{flag} must be JSON (a text in double quotes), got {text!r:.100}: {error}", param=flag
        ) from None
