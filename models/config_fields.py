"""Reading a checkpoint's configuration: every field is checked where it is read, and named when it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import CheckpointError, nearest

__all__ = ["choice", "flag", "positive_float", "positive_int"]

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


def positive_int(config: Mapping[str, Any], field: str, default: Any = _MISSING) -> int:
    """Return a whole number ≥ 1. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"{field} in the model's configuration must be a whole number of at least 1, got {value!r}"
        )
    return value


def positive_float(config: Mapping[str, Any], field: str, default: Any = _MISSING) -> float:
    """Return a finite number > 0. Raises `CheckpointError` naming field and value."""
    value = _value(config, field, default)
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value <= 0:
        raise CheckpointError(
            f"{field} in the model's configuration must be a finite number above 0, got {value!r}"
        )
    return float(value)


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
