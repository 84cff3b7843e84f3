"""Which definition builds a model: that of its architecture, the one asked for, or the bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.core.errors import CheckpointError
from headrace.models.bridge.definition import BridgeDefinition
from headrace.models.bridge.library import causal_class, is_installed
from headrace.models.opening import model_definition

if TYPE_CHECKING:
    from headrace.core.interfaces import ModelDefinition
    from headrace.core.plugin.registry import Registry

__all__ = ["definition_for"]


def definition_for(
    config: Mapping[str, Any], registry: Registry, model_impl: str = "auto"
) -> tuple[ModelDefinition, str | None]:
    """Return the definition for a configuration, which it has checked, and a line for the start-up report, or None.

    `auto` takes the definition that serves the architecture, and the bridge where none does and transformers knows
    it; another word is the name of a registered definition. Raises `CheckpointError` or, for an unknown name,
    `ConfigError`.
    """
    stated = config.get("architectures")
    names = [str(name) for name in stated] if isinstance(stated, list | tuple) else []
    if model_impl != "auto":
        named: ModelDefinition = registry.get("model", model_impl, option="model_impl").factory()
        if named.architectures and not set(names) & set(named.architectures):
            raise CheckpointError(
                f"model_impl is {model_impl!r}, which builds {', '.join(named.architectures)}; the model's "
                f"architecture is {', '.join(names) or 'not stated'}. Use auto or transformers."
            )
        named.check(config)
        return named, None
    served = {one for entry in registry.entries("model") for one in entry.factory().architectures}
    if served & set(names) or not names or not is_installed() or causal_class(config) is None:
        return model_definition(config, registry), None
    bridge = BridgeDefinition()
    bridge.check(config)
    return bridge, (
        f"no definition here serves {', '.join(names)}: it runs through transformers (model_impl transformers)"
    )
