"""Whether a plugin fits: its name, the API range it says, its hook, its options. Nothing is registered here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pluggy
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ValidationError

from headrace.core.errors import ConfigError, nearest
from headrace.core.plugin import hookspecs
from headrace.core.plugin.discovery import GROUP, Found
from headrace.core.plugin.hookspecs import API_VERSION, PROJECT

__all__ = [
    "HOOK",
    "MisfitError",
    "check_api",
    "check_hook",
    "check_major",
    "make_options",
    "new_manager",
    "plugin_name",
]

HOOK = "headrace_register"


class MisfitError(Exception):
    """Why a plugin cannot be loaded: what was found and what is allowed."""


def new_manager() -> pluggy.PluginManager:
    """Return a pluggy manager that knows our hook and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def plugin_name(plugin: Any, expected: str | None) -> str:
    """Return the plugin's `name`. Raises `MisfitError` if there is none, or not the `expected` one."""
    name = getattr(plugin, "name", None)
    if not isinstance(name, str) or not name:
        raise MisfitError(f"it must have a `name`, a string that is not empty; found {name!r}")
    if expected is not None and name != expected:
        raise MisfitError(
            f"it calls itself {name!r}, but its entry point is called {expected!r}; they must be equal"
        )
    return name


def check_major(found: Found) -> None:
    """Judge the entry-point group's version. Raises `MisfitError` with advice on versions."""
    if not found.fits:
        raise MisfitError(
            f"it was made for plugin API {found.major} (group {found.entry.group}), allowed is API "
            f"{API_VERSION[0]} (group {GROUP}); install a version of {found.distribution} for API "
            f"{API_VERSION[0]}, or a Headrace with API {found.major}"
        )


def check_api(says: Any, where: str) -> str:
    """Judge a range of API versions; return it. Raises `MisfitError` if it is none or leaves ours out."""
    offered = ".".join(map(str, API_VERSION))
    if not isinstance(says, str) or not says.strip():
        raise MisfitError(
            f'{where} must say the API versions it works with, such as ">=1,<2"; found {says!r}'
        )
    try:
        fits = SpecifierSet(says).contains(offered)
    except InvalidSpecifier:
        raise MisfitError(f'{where} must be a range of versions such as ">=1,<2"; found {says!r}') from None
    if not fits:
        raise MisfitError(
            f"{where} asks for plugin API {says}, but this Headrace offers {offered}; install a version of the "
            "plugin, or of Headrace, that fits"
        )
    return says


def check_hook(plugin: Any) -> None:
    """Judge the hook implementations as pluggy sees them. Raises `MisfitError`."""
    probe = new_manager()
    try:
        probe.register(plugin, "probe")
        probe.check_pending()
    except pluggy.PluginValidationError as error:
        raise MisfitError(_explain(error)) from None
    impls = [impl for impl in probe.hook.headrace_register.get_hookimpls() if impl.plugin is plugin]
    if not impls:
        if hasattr(plugin, HOOK):
            raise MisfitError(f"its {HOOK} is not marked with @headrace.hookimpl")
        raise MisfitError(
            f"it implements no hook; it must have {HOOK}(registrar, options), marked @headrace.hookimpl"
        )
    [impl] = impls
    if impl.hookwrapper or impl.wrapper:
        raise MisfitError(f"its {HOOK} is a hook wrapper; it must be a plain implementation")
    if impl.kwargnames:
        # pluggy never fills an argument that has a default.
        raise MisfitError(
            f"the arguments of its {HOOK} must have no defaults; found {', '.join(impl.kwargnames)}"
        )
    bound = (staticmethod, classmethod)
    if isinstance(plugin, type) and not isinstance(inspect.getattr_static(plugin, HOOK), bound):
        raise MisfitError(f"it is the class {plugin.__qualname__}; give an instance of it")


def _explain(error: pluggy.PluginValidationError) -> str:
    """Say in our words what pluggy refused."""
    text = " ".join(str(error.args[-1]).split())
    if "unknown hook" in text:
        hook = text.split("'")[1]
        return f"it implements the unknown hook {hook!r}{nearest(hook, [HOOK])}; there is: {HOOK}"
    if "are declared in the hookimpl but" in text:
        extra = text.partition("Argument(s) ")[2].partition(" are declared")[0]
        return f"its {HOOK} has the arguments {extra}, allowed are registrar and options"
    return text


def make_options(plugin: Any, name: str, given: Mapping[str, Any] | None) -> BaseModel | None:
    """Fill the plugin's `Options` from what the configuration gives; None where the plugin has no such model.

    Raises `ConfigError` about what was given, and `MisfitError` if the model is unfit or needs what was not given.
    """
    model = getattr(plugin, "Options", None)
    option = f"plugins.options.{name}"
    if model is None:
        if given:
            raise ConfigError(
                f"the plugin {name!r} takes no options, got {', '.join(given)}; remove {option}",
                option=option,
            )
        return None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise MisfitError(f"its `Options` must be a pydantic model; found {model!r}")
    known = {word for field, info in model.model_fields.items() for word in (info.alias or field, field)}
    if model.model_config.get("extra") != "allow":
        for key in given or {}:
            if key not in known:
                raise ConfigError(
                    f"the plugin {name!r} has no option {key!r}{nearest(key, known)}; it has: "
                    f"{', '.join(sorted(known)) or 'none'}",
                    option=f"{option}.{key}",
                )
    try:
        return model.model_validate(dict(given or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([option, *map(str, first["loc"])])
        text = first["msg"].removeprefix("Value error, ")
        if given is None:
            raise MisfitError(f"it needs options that were not given: {where}: {text}") from None
        raise ConfigError(f"{where}: {text}, got {first['input']!r:.100}", option=where) from None
