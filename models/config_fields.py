"""Reading a checkpoint's configuration: every field is checked where it is read, and named when it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import CheckpointError, nearest

__all__ = ["choice", "flag", "positive_float", "positive_floats", "positive_int", "whole_number"]

_MISSING = object()


def _value(config: Mapping[str, Any], field: str, default: Any) -> Any:
    # null in a config.json means "not set", as it does to the writers of these files.
    value = config.get(field)
    if value is not None:
        return value
    if default is _MISSING:
        raise CheckpointError(
            f"the model's configuration has no field {field!r}{nearest(field, config)}; it must be given"
        )
    return default


def whole_number(config: Mapping[str, Any], field: str, default: Any = _MISSING, *, least: int = 0) -> int:
    """Return a whole number ≥ `least`. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(
            f"{field} in the model's configuration must be a whole number of at least {least}, got {value!r}"
        )
    return value


def positive_int(config: Mapping[str, Any], field: str, default: Any = _MISSING) -> int:
    """Return a whole number ≥ 1. Raises `CheckpointError` naming field and value."""
    return whole_number(config, field, default, least=1)


def positive_float(config: Mapping[str, Any], field: str, default: Any = _MISSING) -> float:
    """Return a finite number > 0. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, default)
    if not _is_positive(value):
        raise CheckpointError(
            f"{field} in the model's configuration must be a finite number above 0, got {value!r}"
        )
    return float(value)


def positive_floats(config: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """Return a list of finite numbers > 0. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, _MISSING)
    if not isinstance(value, list | tuple) or not all(_is_positive(one) for one in value):
        raise CheckpointError(
            f"{field} in the model's configuration must be a list of finite numbers above 0, got {value!r:.200}"
        )
    return tuple(float(one) for one in value)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """Return true or false. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{field} in the model's configuration must be true or false, got {value!r}")
    return value


def choice(config: Mapping[str, Any], field: str, allowed: Sequence[str], default: Any = _MISSING) -> str:
    """Return one of `allowed`. Raises `CheckpointError` naming field, value and the words there are."""
    value = _value(config, field, default)
    if value not in allowed:
        raise CheckpointError(
            f"{field} in the model's configuration is {value!r}; supported are: {', '.join(allowed)}"
        )
    return str(value)
