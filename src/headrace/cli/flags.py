"""Flags' names, and flags' text to values."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from headrace.core.config import OptionSpec, parse_bytes
from headrace.core.errors import ConfigError

__all__ = ["flag_names", "is_bool", "is_list", "metavar", "section_value", "value_of", "values_of"]


def flag_names(name: str, *, boolean: bool = False) -> str:
    """Return how an option is written: `--max-num-seqs`, `--enable-x/--no-enable-x`, `-tp`."""
    dashed = name.replace("_", "-")
    if boolean:
        return f"--{dashed}/--no-{dashed}"
    return f"-{dashed}" if len(dashed) == 2 else f"--{dashed}"


def _members(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def is_bool(spec: OptionSpec) -> bool:
    """Whether the option is a switch."""
    return bool in _members(spec.info.annotation)


def is_list(spec: OptionSpec) -> bool:
    """Whether the flag may be repeated."""
    return any(get_origin(member) is list for member in _members(spec.info.annotation))


def metavar(spec: OptionSpec) -> str:
    """What the help shows for the value."""
    for member in _members(spec.info.annotation):
        if member in (int, float, str):
            return "TEXT" if member is str else "SIZE" if _is_bytes(spec) else "N"
        if get_origin(member) is list:
            return "TEXT"
        if get_origin(member) is Literal:
            return "|".join(map(str, get_args(member)))
    return "JSON"


def _is_bytes(spec: OptionSpec) -> bool:
    found = [*spec.info.metadata]
    for part in (spec.info.annotation, *get_args(spec.info.annotation)):
        if get_origin(part) is Annotated:
            found += get_args(part)[1:]
    return any(getattr(item, "func", None) is parse_bytes for item in found)


def value_of(spec: OptionSpec, text: str) -> Any:
    """Turn a flag's text into what the option's type wants; what does not fit stays text and is refused later."""
    members = [member for member in _members(spec.info.annotation) if member is not type(None)]
    for kind in (int, float):
        if kind in members and not _is_bytes(spec):
            try:
                return kind(text)
            except ValueError:
                continue
    simple = all(member in (int, float, str) or get_origin(member) is Literal for member in members)
    if simple or (str in members and not text.lstrip().startswith(("{", "["))):
        return text
    return _json(flag_names(spec.flat), text)


def values_of(spec: OptionSpec, texts: Sequence[str]) -> list[Any]:
    """Turn a repeated flag into a list; one value may be a JSON list."""
    if len(texts) == 1 and texts[0].lstrip().startswith("["):
        value = _json(flag_names(spec.flat), texts[0])
        return value if isinstance(value, list) else [value]
    return list(texts)


def section_value(name: str, text: str) -> dict[str, Any]:
    """Read a section given as JSON. Raises `ConfigError`."""
    value = _json(flag_names(name), text)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{flag_names(name)} must be a JSON object of options, got {text!r:.100}", option=name
        )
    return value


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be JSON, got {text!r:.100}: {error}", option=flag) from None
