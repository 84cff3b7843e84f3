"""A request's fields, sorted: those of the route, those of the sampler, and those that nobody knows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.core.errors import nearest
from headrace.core.plugin.registry import Registry
from headrace.core.sampling_params import SamplingParams
from headrace.server.errors import ApiError

__all__ = ["Fields", "KnownFields", "ignored_header", "sampling_names"]

MAX_NAMES = 20
MAX_NAME = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fields:
    """One request's fields. A null stands for a default, so it is left out."""

    own: dict[str, Any]
    """Of the route's body."""
    sampling: dict[str, Any]
    """For `SamplingParams`: core's fields and the options of plugins."""
    unknown: list[str]


class KnownFields:
    """What a route knows.

    body: the model of its own fields, which shadow those of the sampler.
    sampling: the sampler's, see `sampling_names`.
    """

    def __init__(self, body: type[BaseModel], sampling: Collection[str] = ()) -> None:
        self._own = frozenset(body.model_fields)
        self._sampling = frozenset(sampling) - self._own

    def takes(self, name: str) -> bool:
        """Whether a field is the route's or the sampler's."""
        return name in self._own or name in self._sampling

    def sort(self, data: Mapping[str, Any]) -> Fields:
        """Sort a request's fields."""
        fields = Fields({}, {}, [])
        for name, value in data.items():
            if name not in self._own and name not in self._sampling:
                fields.unknown.append(name)
            elif value is not None:
                (fields.own if name in self._own else fields.sampling)[name] = value
        return fields

    def refuse(self, unknown: Sequence[str]) -> None:
        """Raise `ApiError` naming unknown fields, each with the nearest that is known."""
        if unknown:
            told = ", ".join(
                f"{name}{nearest(name, {*self._own, *self._sampling})}" for name in _names(unknown)
            )
            raise ApiError(
                400,
                f"unknown fields: {told}. The server refuses what it does not know (--strict)",
                param=unknown[0],
                code="unknown_field",
            )


def sampling_names(registry: Registry) -> list[str]:
    """Return the fields of `SamplingParams`, and the options that plugins bring."""
    return [*SamplingParams.model_fields, *(entry.name for entry in registry.entries("request_option"))]


def ignored_header(request_id: str, unknown: Sequence[str]) -> dict[str, str]:
    """Log which fields were passed over, and return the header that says so; nothing where there are none."""
    if not unknown:
        return {}
    told = ", ".join(_names(unknown))
    logger.warning("%s: unknown fields are passed over: %s", request_id, told)
    return {"X-Headrace-Ignored": told}


def _names(unknown: Sequence[str]) -> list[str]:
    """Return names fit for a header and a log: printable ASCII, short, and not too many."""
    names = []
    for name in unknown[:MAX_NAMES]:
        printable = "".join(c if " " < c <= "~" and c != "," else "?" for c in name[:MAX_NAME])
        names.append(printable or "''")
    more = len(unknown) - MAX_NAMES
    return [*names, f"and {more} more"] if more > 0 else names
