"""The one policy for all plugins: found, judged, switched off, loaded in order, or set aside with a reason.

    candidates (built-in, entry points by name, files, objects)
      → names: duplicates, unknown ones in enable, disable and options
      → each: group's version → keywords → import → name → API range → hook → options
      → hooks called: built-in plugins first, then the others; tryfirst, plain, trylast within each

A plugin that was *asked for* (built-in, a file, an object, or named in `enable` or `options`) and cannot load stops
the start; another one is reported and set aside. Nothing is kept between calls: every engine has its own plugins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pluggy
from pydantic import BaseModel

from headrace.core.errors import ConfigError, PluginLoadError, nearest
from headrace.core.plugin.candidates import Candidate, Origin, collect
from headrace.core.plugin.judge import (
    HOOK,
    MisfitError,
    check_api,
    check_hook,
    check_major,
    make_options,
    new_manager,
    plugin_name,
)
from headrace.core.plugin.registry import KINDS, NameClashError, Registrar, Registry, Room

__all__ = ["LoadedPlugins", "PluginInfo", "State", "load_plugins"]

logger = logging.getLogger(__name__)

State = Literal["loaded", "disabled", "broken"]


@dataclass(frozen=True)
class PluginInfo:
    """What is known about one plugin, for reports."""

    name: str
    origin: Origin
    where: str
    """Module, `module:attribute`, path of the file, or type of the object."""
    state: State
    reason: str = ""
    """Why it is broken; who switched it off."""
    distribution: str | None = None
    version: str | None = None
    api: str = ""
    """The API range it says."""
    registered: tuple[tuple[str, str], ...] = ()
    """(kind, name) of its parts, in order."""
    rooms: tuple[Room, ...] = ()
    """Where its parts run."""


@dataclass
class LoadedPlugins:
    """An engine's plugins."""

    registry: Registry
    manager: pluggy.PluginManager
    infos: list[PluginInfo] = field(default_factory=list)
    """Every plugin there is, loaded or not, in the order of loading."""

    def info(self, name: str) -> PluginInfo:
        """Return one plugin's. Raises `ConfigError` with the nearest name."""
        for info in self.infos:
            if info.name == name:
                return info
        known = [info.name for info in self.infos]
        raise ConfigError(
            f"no plugin is called {name!r}{nearest(name, known)}; there are: {', '.join(known) or 'none'}"
        )


@dataclass
class _Ready:
    """A plugin that fits; its hook has not been called."""

    plugin: Any
    options: BaseModel | None
    api: str


def load_plugins(
    builtin: Sequence[str],
    essential: frozenset[str],
    *,
    objects: Sequence[Any] = (),
    files: Sequence[str | Path] = (),
    enable: Sequence[str] = (),
    disable: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    discover: bool = True,
    strict: bool = True,
) -> LoadedPlugins:
    """Load an engine's plugins by the policy above.

    builtin: names of modules, each a plugin; loaded first, in this order.
    essential: names of plugins that cannot be switched off.
    enable: installed plugins that must load.
    discover: look for installed ones.
    strict: False keeps going where the start would stop, and reports such plugins as broken.

    Raises `PluginLoadError` for a plugin that was asked for and cannot load or clashes with another, and
    `ConfigError` for an unknown name in `disable` or `options`, for options that are wrong, and for an essential
    plugin in `disable`.
    """
    options = options or {}
    candidates = collect(builtin, objects, files, discover=discover, asked={*enable, *options})
    _check_names(candidates, enable, disable, options)
    loader = _Loader(LoadedPlugins(Registry(), new_manager()), strict)
    loader.set_aside_duplicates(candidates)
    _check_essential(candidates, essential, disable)
    loader.load(candidates, frozenset(disable), options)
    loader.result.manager.check_pending()
    return loader.result


class _Loader:
    """One run of `load_plugins`."""

    def __init__(self, result: LoadedPlugins, strict: bool) -> None:
        self.result = result
        self.strict = strict
        self.infos: dict[int, PluginInfo] = {}
        """By position among the candidates."""

    def set_aside_duplicates(self, candidates: Sequence[Candidate]) -> None:
        """Two plugins of one name: an error that names both."""
        first: dict[str, Candidate] = {}
        for index, candidate in enumerate(candidates):
            if candidate.problem:
                continue  # it will not load, for a reason of its own
            other = first.setdefault(candidate.name, candidate)
            if other is candidate:
                continue
            self._broken(
                index,
                candidate,
                f"{other.title} has the same name; uninstall one of them or give it another name",
                stop=True,
            )

    def load(
        self,
        candidates: Sequence[Candidate],
        disable: frozenset[str],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Judge every candidate, then call the hooks in order."""
        ready: dict[int, _Ready] = {}
        for index, candidate in enumerate(candidates):
            if index in self.infos:
                continue
            if candidate.name in disable:
                self.infos[index] = replace(_info(candidate), state="disabled", reason="switched off by name")
                continue
            try:
                ready[index] = _judge(candidate, options.get(candidate.name))
            except MisfitError as misfit:
                self._broken(index, candidate, str(misfit), cause=misfit.__cause__)
        for index in self._hook_order(candidates, ready):
            self._register(index, candidates[index], ready[index])
        self.result.infos.extend(self.infos[index] for index in sorted(self.infos))

    def _hook_order(self, candidates: Sequence[Candidate], ready: Mapping[int, _Ready]) -> list[int]:
        """Built-in plugins, then the others; in each tryfirst, plain, trylast; then the candidates' order."""
        manager = self.result.manager
        for index, item in ready.items():
            manager.register(item.plugin, candidates[index].name)
        rank = {
            impl.plugin_name: -1 if impl.tryfirst else 1 if impl.trylast else 0
            for impl in manager.hook.headrace_register.get_hookimpls()
        }
        return sorted(ready, key=lambda i: (candidates[i].origin != "built-in", rank[candidates[i].name], i))

    def _register(self, index: int, candidate: Candidate, ready: _Ready) -> None:
        """Call one plugin's hook; all of what it registers stays, or nothing."""
        registry, manager = self.result.registry, self.result.manager
        [impl] = [i for i in manager.hook.headrace_register.get_hookimpls() if i.plugin is ready.plugin]
        arguments = {"registrar": Registrar(registry, candidate.name), "options": ready.options}
        try:
            with registry.transaction():
                impl.function(*(arguments[name] for name in impl.argnames))
        except NameClashError as clash:
            manager.unregister(ready.plugin)
            self._broken(index, candidate, str(clash), stop=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - isolation: a plugin's failure is judged, whatever it is
            manager.unregister(ready.plugin)
            self._broken(index, candidate, f"its {HOOK} raised {_words(error)}", cause=error)
        else:
            parts = tuple(
                (kind, entry.name)
                for kind in KINDS
                for entry in registry.entries(kind)
                if entry.plugin == candidate.name
            )
            rooms = tuple(sorted({KINDS[kind].room for kind, _ in parts}))
            self.infos[index] = replace(_info(candidate), api=ready.api, registered=parts, rooms=rooms)

    def _broken(
        self,
        index: int,
        candidate: Candidate,
        reason: str,
        *,
        stop: bool = False,
        cause: BaseException | None = None,
    ) -> None:
        """Stop the start for a plugin that was asked for (or if `stop`), set another one aside."""
        text = f"{candidate.title} cannot be loaded for the hook {HOOK}: {reason}"
        if self.strict and (stop or candidate.asked):
            raise PluginLoadError(text, plugin=candidate.name) from cause
        if self.strict:
            logger.warning("%s; it was not asked for and is set aside", text)
        self.infos[index] = replace(_info(candidate), state="broken", reason=reason)


def _judge(candidate: Candidate, options: Mapping[str, Any] | None) -> _Ready:
    """Judge all that can be judged before the hook is called, cheapest first.

    Raises `MisfitError`, or `ConfigError` about the options given.
    """
    if candidate.found is not None:
        check_major(candidate.found)
        if candidate.found.needs:
            check_api(candidate.found.needs, "the keywords of its distribution")
    plugin = candidate.load()
    plugin_name(plugin, candidate.name)
    api = check_api(getattr(plugin, "headrace_api", None), "its headrace_api")
    check_hook(plugin)
    return _Ready(plugin, make_options(plugin, candidate.name, options), api)


def _info(candidate: Candidate) -> PluginInfo:
    found = candidate.found
    return PluginInfo(
        candidate.name,
        candidate.origin,
        candidate.where,
        "loaded",
        distribution=found.distribution if found else None,
        version=found.version if found else None,
        api=found.needs if found else "",
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check_names(
    candidates: Sequence[Candidate],
    enable: Sequence[str],
    disable: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """Refuse names that no plugin has, and plugins both asked for and switched off."""
    known = sorted({candidate.name for candidate in candidates})
    there = f"there are: {', '.join(known) or 'none'}"
    for name in enable:
        if name not in known:
            raise PluginLoadError(
                f"plugin {name!r} was asked for (enable_plugins), but no installed distribution offers it"
                f"{nearest(name, known)}; {there}",
                plugin=name,
            )
        if name in disable:
            raise ConfigError(
                f"plugin {name!r} is in enable_plugins and in disable_plugins; remove it from one",
                option="disable_plugins",
            )
    for option, names in (("disable_plugins", disable), ("plugin_options", list(options))):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{option} names the plugin {name!r}, which there is not{nearest(name, known)}; {there}",
                    option=option,
                )


def _check_essential(
    candidates: Sequence[Candidate], essential: frozenset[str], disable: Sequence[str]
) -> None:
    """Refuse to switch off what no engine can do without, and say which options choose other parts."""
    for name in disable:
        if name not in essential:
            continue
        registry = Registry()
        [candidate, *_] = [c for c in candidates if c.name == name]
        loader = _Loader(LoadedPlugins(registry, new_manager()), strict=False)
        loader.load([candidate], frozenset(), {})
        parts = [(KINDS[kind], part) for kind in KINDS for part in registry.names(kind)]
        choices = sorted({kind.option for kind, _ in parts if kind.option})
        brings = ", ".join(f"{kind.words} {part!r}" for kind, part in parts)
        raise ConfigError(
            f"plugin {name!r} cannot be switched off: an engine needs what it brings ({brings or 'its parts'})"
            + (f"; choose other parts with {', '.join(choices)}" if choices else "")
            + ", or register parts of the same names with override=True",
            option="disable_plugins",
        )
