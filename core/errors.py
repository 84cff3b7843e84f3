"""Every error Headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)      an option of the engine: wrong value, unknown name, a clash
    ├── RequestError (ValueError)     one request: its prompt or one of its parameters
    ├── OverloadedError               one request: nothing is wrong with it, and there is no place for it now
    ├── CheckpointError               model files: missing, damaged, unknown, not matching
    ├── PluginError                   a plugin, by name
    │   ├── PluginLoadError           it was asked for and cannot be loaded
    │   └── PluginCallError           it raised while it was called
    └── EngineError                   the engine stopped; the cause is chained

Each text says what was wrong, the value got, the values allowed and the option to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "HeadraceError",
    "OverloadedError",
    "PluginCallError",
    "PluginError",
    "PluginLoadError",
    "RequestError",
    "error_of",
    "nearest",
]


class HeadraceError(Exception):
    """The root: catch this to catch everything Headrace raises on purpose.

    `kind` is what of it crosses processes beside its text, see `error_of`.
    """

    kind: ClassVar[str] = "engine"


class ConfigError(HeadraceError, ValueError):
    """An engine option is wrong; `option` is its flat name where there is one."""

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class RequestError(HeadraceError, ValueError):
    """One request is wrong; nothing else is affected. `param` names the field, if there is one."""

    kind = "request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(HeadraceError):
    """A request finds no place now; the same one may be served later."""

    kind = "overloaded"


class CheckpointError(HeadraceError):
    """Model files are missing, damaged, of an unknown kind, or do not match their configuration."""


class PluginError(HeadraceError):
    """Something is wrong with a plugin; `plugin` is its name."""

    def __init__(self, message: str, *, plugin: str) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginLoadError(PluginError):
    """A plugin that was asked for cannot be loaded."""


class PluginCallError(PluginError):
    """A plugin raised while it was called; the cause is chained."""

    kind = "plugin"


class EngineError(HeadraceError):
    """The engine stopped and cannot go on; the cause is chained."""


def error_of(kind: str, text: str) -> HeadraceError:
    """Return what a request that failed elsewhere raises here: the error of that kind with its text."""
    if kind == RequestError.kind:
        return RequestError(text)
    if kind == OverloadedError.kind:
        return OverloadedError(text)
    if kind == PluginCallError.kind:
        return PluginCallError(text, plugin="")
    return EngineError(text)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest of `known`, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""
