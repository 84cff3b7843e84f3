"""What a checkpoint's configuration says of its quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["not_stated", "states"]


def states(config: Mapping[str, Any], method: str) -> bool:
    """Whether a configuration says that its weights are quantized by `method`."""
    stated = config.get("quantization_config")
    return isinstance(stated, Mapping) and stated.get("quant_method") == method


def not_stated(method: str) -> str:
    """Return the reason why a checkpoint is not one of `method`."""
    return f"its configuration has no quantization_config of quant_method {method!r}"
