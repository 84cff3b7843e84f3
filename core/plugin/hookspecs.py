"""The one hook a plugin implements. Hooks build, objects run: nothing per token goes through pluggy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from headrace.core.plugin.registry import Registrar

__all__ = ["API_VERSION", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "headrace"

API_VERSION = (1, 0)
"""Major: a contract changed so that plugins must change. Minor: something was added."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register what the plugin brings.

    Called once an engine, in the process that builds it, before anything is built; built-in plugins first, then
    by `tryfirst` and `trylast`. All plugins are called (since API 1.0).

    registrar: has one method a kind, see `Registrar`.
    options: an instance of the plugin's `Options` model, filled from `plugins.options.NAME`; None without one.
    """
