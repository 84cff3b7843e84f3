"""Validating what was given, and saying what is allowed where it is wrong."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationError

from headrace.configuration.given import Given
from headrace.core.config import OptionSpec, parse_bytes
from headrace.core.errors import ConfigError

__all__ = ["allowed", "make_section"]

M = TypeVar("M", bound=BaseModel)

_PLAIN = ("_type", "_parsing", "_than", "_equal", "_error", "_from_float", "_required")
"""Kinds of pydantic's errors that `allowed` explains, by their endings."""


def make_section(
    model: type[M], section: str, table: Mapping[str, OptionSpec], given: Mapping[str, Given]
) -> M:
    """Fill one section from what was given. Raises `ConfigError` naming option, value, source and what is allowed."""
    specs = {spec.field: spec for spec in table.values() if spec.section == section}
    values = {field: given[spec.flat].value for field, spec in specs.items() if spec.flat in given}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        spec = specs.get(str(first["loc"][0])) if first["loc"] else None
        text = first["msg"].removeprefix("Value error, ")
        if spec is None or spec.flat not in given:
            raise ConfigError(f"section {section}: {text}", option=section) from None
        item = given[spec.flat]
        inside = isinstance(item.value, (list, dict)) and len(first["loc"]) > 1
        plain = first["type"].endswith(_PLAIN) and first["type"] != "value_error" and not inside
        raise ConfigError(
            f"{spec.flat} must be {allowed(spec)}" + _got(item, spec)
            if plain
            else f"{spec.flat}: {text}, got {first['input']!r:.200} ({item.source})",
            option=spec.flat,
        ) from None


def _got(item: Given, spec: OptionSpec) -> str:
    value = item.value
    if value is None:
        default = "" if spec.info.is_required() else f" to get the default, {spec.info.get_default()!r}"
        return f", got null ({item.source}); leave it out{default}"
    hint = ""
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n") and _is_bool(spec):
        hint = "; yes, no, on and off are plain text here"
    return f", got {value!r:.200} ({item.source}){hint}"


def _is_bool(spec: OptionSpec) -> bool:
    return bool in _members(spec.info.annotation)


def allowed(spec: OptionSpec) -> str:
    """Say in words which values an option takes: `an integer from 1 to 1024 or null`."""
    limits = _limits(spec.info.metadata)
    words = [_words(member, spec.info.metadata, limits) for member in _members(spec.info.annotation)]
    return " or ".join(words)


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


def _words(member: Any, metadata: list[Any], limits: str) -> str:
    if get_origin(member) is Annotated:
        base, *metadata = get_args(member)
        return _words(base, metadata, limits)
    if any(isinstance(item, BeforeValidator) and item.func is parse_bytes for item in metadata):
        return "bytes, a positive number or one with a unit such as 2GiB or 500MB"
    if get_origin(member) is Literal:
        return "one of " + ", ".join(map(str, get_args(member)))
    if member is type(None):
        return "null"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    if member in names:
        return names[member] + (limits if member in (int, float) else "")
    origin = get_origin(member) or member
    if origin is list:
        return "a list"
    if origin in (dict, Mapping, typing.Mapping):
        return "a mapping"
    return str(getattr(member, "__name__", member))


def _limits(metadata: list[Any]) -> str:
    bound: dict[str, Any] = {}
    for item in metadata:
        for name in ("ge", "gt", "le", "lt"):
            value = getattr(item, name, None)
            if value is not None:
                bound[name] = value
    if "ge" in bound and "le" in bound:
        return f" from {bound['ge']} to {bound['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " " + " and ".join(f"{words[name]} {value}" for name, value in bound.items()) if bound else ""
