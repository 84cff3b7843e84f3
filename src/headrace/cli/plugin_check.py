"""Trying a plugin's parts without an engine: what can be made is made and held to its contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from headrace.core import interfaces
from headrace.core.plugin.registry import KINDS

if TYPE_CHECKING:
    from headrace.core.plugin.manager import LoadedPlugins, PluginInfo

__all__ = ["check_parts"]

CONTRACTS = {
    "attention_backend": interfaces.AttentionBackend,
    "op_set": interfaces.OpSet,
    "model": interfaces.ModelDefinition,
    "model_source": interfaces.ModelSource,
    "weight_loader": interfaces.WeightLoader,
    "scheduling_policy": interfaces.SchedulingPolicy,
    "grammar": interfaces.GrammarBackend,
}
"""Kinds whose factories take nothing."""


def check_parts(loaded: LoadedPlugins, info: PluginInfo) -> Iterator[tuple[str, bool]]:
    """Yield a line and whether it is good, for each part of a plugin."""
    for kind, name in info.registered:
        factory = loaded.registry.get(kind, name).factory
        title = f"{KINDS[kind].words} {name}"
        try:
            result = _try(kind, factory)
        except Exception as error:  # noqa: BLE001 - isolation: a plugin's factory may raise anything
            yield f"{title} raised {type(error).__name__}: {error}", False
            continue
        yield f"{title}: {result or 'is as its contract says'}", not result.startswith("lacks")


def _try(kind: str, factory: Any) -> str:
    """Return what is to be said about a part; empty when it was made and has all its contract asks for."""
    if kind == "config_section":
        factory()
        return "its defaults are valid"
    if kind == "request_option":
        TypeAdapter(factory)
        return "its type can be validated"
    contract = CONTRACTS.get(kind)
    if contract is None:
        return "has a factory, which is called when an engine starts"
    part = factory()
    missing = [name for name in _members(contract) if not hasattr(part, name)]
    return f"lacks {', '.join(missing)}" if missing else ""


def _members(contract: type) -> list[str]:
    """Names a protocol asks for: attributes and methods, its bases' included."""
    names: dict[str, None] = {}
    for base in reversed(contract.__mro__):
        if base is not object and base.__module__.startswith("headrace."):
            public = [*vars(base).get("__annotations__", {}), *vars(base)]
            names.update(dict.fromkeys(name for name in public if not name.startswith("_")))
    return list(names)
