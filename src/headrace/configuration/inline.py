"""Parts given as objects: `LLM(attention_backend=MyBackend)` becomes a plugin that registers it, and its name."""

from __future__ import annotations

from typing import Any

from headrace.configuration.checks import SELECTING
from headrace.core.plugin.hookspecs import API_VERSION, hookimpl
from headrace.core.plugin.registry import Registrar

__all__ = ["PartPlugin", "inline_parts"]


class PartPlugin:
    """A plugin that brings one part."""

    headrace_api = f">={API_VERSION[0]},<{API_VERSION[0] + 1}"

    def __init__(self, option: str, part: Any) -> None:
        self.name = f"argument_{option}"
        self.kind = SELECTING[option]
        self.part = part
        self.part_name = str(getattr(part, "__name__", type(part).__name__))

    @hookimpl
    def headrace_register(self, registrar: Registrar) -> None:
        """Register the part: a class or function is its own factory, an object is handed out as it is."""
        part = self.part
        getattr(registrar, self.kind)(self.part_name, part if callable(part) else lambda *_: part)


def inline_parts(keywords: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Replace parts among `keywords` by their names; return the keywords and the plugins that bring the parts.

    A list under `plugins` holds plugin objects and is taken out too.
    """
    objects: list[Any] = []
    if isinstance(keywords.get("plugins"), (list, tuple)):
        objects += keywords.pop("plugins")
    for option in SELECTING:
        part = keywords.get(option)
        if part is not None and not isinstance(part, (str, int, float, list, dict)):
            plugin = PartPlugin(option, part)
            objects.append(plugin)
            keywords[option] = plugin.part_name
    return keywords, objects
