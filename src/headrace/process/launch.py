"""What one process tells another so that both start from the same configuration and the same plugins."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import TypeAdapter

from headrace.configuration import Started, start_configuration
from headrace.core.errors import ConfigError, PluginLoadError
from headrace.core.plugin.manager import LoadedPlugins

__all__ = ["LaunchSpec", "launch_spec", "started_from"]

_PLAIN = TypeAdapter(Any)


class LaunchSpec(msgspec.Struct, frozen=True):
    """A configuration and the plugins it was resolved with, in plain values."""

    options: dict[str, Any]
    """By flat name: everything that is no default."""
    plugins: list[tuple[str, str, str]]
    """Name, place and version of every plugin that was loaded."""
    notes: list[str]
    """What the user should be told of the configuration."""


def launch_spec(started: Started) -> LaunchSpec:
    """Return what another process starts from.

    Raises `ConfigError` for parts that exist in this process alone: objects given to a call.
    """
    here = [info for info in started.plugins.infos if info.origin == "object" and info.state == "loaded"]
    if here:
        raise ConfigError(
            f"plugin {here[0].name!r} ({here[0].where}) is an object of this process, and the engine runs in another "
            "one, which cannot see it; put it into a file and name that in plugin_files (plugins: {files: [...]}), "
            "install it with an entry point, or start with engine_process=False",
            option="engine_process",
        )
    provenance = started.provenance
    options = {
        flat: _PLAIN.dump_python(value, mode="json")
        for flat, value in provenance.values.items()
        if provenance.sources[flat].kind != "default" and value is not None
    }
    return LaunchSpec(options, _loaded(started.plugins), list(started.notes))


def started_from(spec: LaunchSpec) -> Started:
    """Start the configuration again. Raises `PluginLoadError` where other plugins than the first process's load."""
    options = dict(spec.options)
    started = start_configuration(options.pop("model", None), keywords=options)
    loaded = _loaded(started.plugins)
    if loaded != spec.plugins:
        differing = sorted({*map(tuple, loaded)} ^ {*map(tuple, spec.plugins)})
        name, where, version = differing[0]
        raise PluginLoadError(
            f"plugin {name!r} ({where} {version or 'without version'}) is not the same in this process as in the one "
            f"that started it; there: {spec.plugins}; here: {loaded}. Was something installed or removed meanwhile?",
            plugin=name,
        )
    started.provenance.notes[:] = spec.notes
    return started


def _loaded(plugins: LoadedPlugins) -> list[tuple[str, str, str]]:
    return [(info.name, info.where, info.version or "") for info in plugins.infos if info.state == "loaded"]
