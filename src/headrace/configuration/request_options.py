"""The keywords of `SamplingParams` that are not core's: known to a plugin, or refused."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from headrace.core.errors import RequestError, nearest
from headrace.core.plugin.registry import Registry
from headrace.core.sampling_params import SamplingParams

__all__ = ["request_options"]


def request_options(registry: Registry, params: SamplingParams) -> None:
    """Check the options of plugins on a request; None stands for an option that was not given.

    Raises `RequestError` for a keyword that neither core nor a plugin knows, and for a value of the wrong type.
    """
    for name, value in params.options.items():
        entries = {entry.name: entry for entry in registry.entries("request_option")}
        if name not in entries:
            known = [*SamplingParams.model_fields, *entries]
            brought = f"; plugins bring: {', '.join(entries)}" if entries else ""
            raise RequestError(f"unknown parameter {name!r}{nearest(name, known)}{brought}", param=name)
        if value is None:
            continue
        try:
            TypeAdapter(entries[name].factory).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([name, *map(str, first["loc"])])
            text = first["msg"].removeprefix("Value error, ")
            raise RequestError(
                f"{where}: {text}, got {first['input']!r:.100} (plugin {entries[name].plugin!r})", param=name
            ) from None
