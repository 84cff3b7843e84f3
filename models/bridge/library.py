"""The `transformers` package, when it is wanted: whether it is there, which class serves an architecture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import CheckpointError

__all__ = ["IMPLEMENTATION", "causal_class", "is_installed", "model_config", "require_library"]

IMPLEMENTATION = "headrace"
"""What our attention is called among transformers' implementations."""

_NEEDS = "pip install 'headrace[bridge]' installs it (the package transformers, 5.24 or newer)"


def is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return importlib.util.find_spec("transformers") is not None


def require_library() -> Any:
    """Import and return `transformers`. Raises `CheckpointError` saying how to install it."""
    if not is_installed():
        raise CheckpointError(
            "the model is to be built by transformers (model_impl is 'transformers', or no definition here serves "
            f"its architecture), which is not installed: {_NEEDS}"
        )
    import transformers

    if not hasattr(transformers, "AttentionInterface") or int(transformers.__version__.split(".")[0]) < 5:
        raise CheckpointError(f"transformers {transformers.__version__} is too old for the bridge: {_NEEDS}")
    return transformers


def causal_class(config: Mapping[str, Any]) -> Any:
    """Return transformers' class for the configuration's `architectures`; None where it has none that writes text."""
    transformers = require_library()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        causal.update((names,) if isinstance(names, str) else names)
    stated = config.get("architectures")
    for name in stated if isinstance(stated, list | tuple) else ():
        if name in causal:
            return getattr(transformers, name, None)
    return None


def model_config(cls: Any, config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object for a class. Raises `CheckpointError` with transformers' reason."""
    from huggingface_hub.errors import StrictDataclassError

    # What is told about loading and quantizing is not the model's shape.
    own = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype", "auto_map")}
    try:
        return cls.config_class.from_dict(own)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"transformers' {cls.__name__} cannot read the model's configuration: {error}"
        ) from error
