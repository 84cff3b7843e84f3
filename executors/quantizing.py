"""Which quantization method is at work on a checkpoint: the one asked for, or the one that claims it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.errors import CheckpointError, ConfigError
from headrace.models.quantized import stated_method, unknown_method

if TYPE_CHECKING:
    from headrace.core.interfaces import Checkpoint, QuantizationMethod
    from headrace.core.plugin.registry import Registry

__all__ = ["choose_quantization"]


def choose_quantization(
    registry: Registry, wanted: str | None, checkpoint: Checkpoint
) -> QuantizationMethod | None:
    """Return the method to hold the weights by; None: as numbers of the type to compute in.

    wanted: what the configuration asks for (`quantization`), by name.
    Raises `ConfigError` where that is not what the checkpoint says of itself, or cannot be used on it, and
    `CheckpointError` where the checkpoint's own method cannot do what its configuration says.
    """
    methods: dict[str, QuantizationMethod] = {
        entry.name: entry.factory() for entry in registry.entries("quantization")
    }
    own = next((name for name, method in methods.items() if method.claims(checkpoint.config)), None)
    said = stated_method(checkpoint.config)
    if said is not None and own is None:
        raise CheckpointError(unknown_method(said, registry))
    if wanted is None:
        return None if own is None else _usable(methods[own], checkpoint, asked=False)
    registry.get("quantization", wanted, option="quantization")
    if own is not None and own != wanted:
        raise ConfigError(
            f"quantization is {wanted!r}, but the checkpoint {checkpoint.path} is quantized by {said!r}; leave the "
            f"option out, or set it to {own!r}",
            option="quantization",
        )
    return _usable(methods[wanted], checkpoint, asked=True)


def _usable(method: QuantizationMethod, checkpoint: Checkpoint, *, asked: bool) -> QuantizationMethod:
    reasons = method.why_not(checkpoint)
    if not reasons:
        return method
    told = "; ".join(reasons)
    if asked:
        raise ConfigError(
            f"quantization {method.name!r} cannot be used on {checkpoint.path}: {told}", option="quantization"
        )
    raise CheckpointError(f"its weights are quantized by {method.name!r} in a way not known here: {told}")
