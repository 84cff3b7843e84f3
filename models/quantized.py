"""What a checkpoint's configuration says of how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.core.plugin.registry import Registry

__all__ = ["stated_method", "unknown_method"]


def stated_method(config: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a configuration's `quantization_config`; None where it has none."""
    stated = config.get("quantization_config") or config.get("compression_config")
    if stated is None:
        return None
    return str(stated.get("quant_method") if isinstance(stated, Mapping) else stated)[:50]


def unknown_method(stated: str, registry: Registry) -> str:
    """Say in words for a user that no method claims a checkpoint quantized by `stated`."""
    known = [
        entry.name
        for entry in registry.entries("quantization")
        if entry.factory().claims({"quantization_config": {"quant_method": entry.name}})
    ]
    return (
        f"the weights are quantized by {stated!r}; methods supported here: {', '.join(known) or 'none'}. Take one of "
        "those, or a checkpoint in bfloat16, float16 or float32."
    )
