"""The plugins there are, before any is judged: built-in ones, installed ones, files, objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.core.plugin import discovery
from headrace.core.plugin.discovery import Found
from headrace.core.plugin.judge import MisfitError, plugin_name

__all__ = ["Candidate", "Origin", "collect"]

Origin = Literal["built-in", "entry point", "file", "object"]


@dataclass(frozen=True)
class Candidate:
    """One plugin. `load` returns the module or object, or raises `MisfitError`."""

    name: str
    origin: Origin
    where: str
    load: Callable[[], Any]
    asked: bool
    """Whether the start must stop when it cannot load."""
    found: Found | None = None
    problem: bool = False
    """Whether it is known already that it does not load."""

    @property
    def title(self) -> str:
        """Name, origin, and distribution with version: how messages call it."""
        package = f"{self.found.distribution} {self.found.version}, " if self.found else ""
        return f"plugin {self.name!r} ({package}{self.origin} {self.where})"


def collect(
    builtin: Sequence[str],
    objects: Sequence[Any],
    files: Sequence[str | Path],
    *,
    discover: bool,
    asked: set[str],
) -> list[Candidate]:
    """Return all candidates in the order of loading. Installed plugins are not imported here."""
    candidates = [_named("built-in", module, module, _importer(module)) for module in builtin]
    if discover:
        installed = discovery.discover()
        fitting = {found.name for found in installed if found.fits}
        # One made for another API only stops the start if nothing else of that name is there.
        candidates += [
            _installed(found, found.name in asked and (found.fits or found.name not in fitting))
            for found in installed
        ]
    candidates += [_named("file", str(path), Path(path).stem, _file_importer(path)) for path in files]
    candidates += [_named("object", _kind(item), _kind(item), _constant(item)) for item in objects]
    return candidates


def _named(origin: Origin, where: str, stand_in: str, load: Callable[[], Any]) -> Candidate:
    """Load now to learn the name; if that fails, the same failure is raised again when it is judged."""
    try:
        plugin = load()
        return Candidate(plugin_name(plugin, None), origin, where, _constant(plugin), asked=True)
    except MisfitError as misfit:
        return Candidate(stand_in, origin, where, _failure(misfit), asked=True, problem=True)


def _installed(found: Found, asked: bool) -> Candidate:
    def load() -> Any:
        try:
            return found.entry.load()
        except (Exception, SystemExit) as error:
            raise MisfitError(
                f"importing {found.entry.value} raised {type(error).__name__}: {error}"
            ) from error

    return Candidate(found.name, "entry point", found.entry.value, load, asked, found, not found.fits)


def _kind(item: Any) -> str:
    """How to call an object: a module by its name, anything else by its type's."""
    return str(getattr(item, "__name__", None) or f"{type(item).__module__}.{type(item).__qualname__}")


def _importer(module: str) -> Callable[[], Any]:
    def load() -> Any:
        try:
            return importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise MisfitError(f"importing {module} raised {type(error).__name__}: {error}") from error

    return load


def _file_importer(path: str | Path) -> Callable[[], Any]:
    def load() -> Any:
        try:
            return discovery.import_file(path)
        except OSError as error:
            raise MisfitError(f"the file cannot be read: {error}") from error
        except (Exception, SystemExit) as error:
            raise MisfitError(f"importing it raised {type(error).__name__}: {error}") from error

    return load


def _constant(plugin: Any) -> Callable[[], Any]:
    return lambda: plugin


def _failure(misfit: MisfitError) -> Callable[[], Any]:
    def load() -> Any:
        raise misfit

    return load
