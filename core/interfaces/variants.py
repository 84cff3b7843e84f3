"""The contract of model variants: names beside the model's own, under which requests get something added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["ModelVariant", "ModelVariants"]


@dataclass(frozen=True)
class ModelVariant:
    """One more name that clients may call for."""

    name: str
    root: str
    """Where it comes from, for people."""
    options: Mapping[str, Any]
    """Request options that a request by this name gets."""


@runtime_checkable
class ModelVariants(Protocol):
    """Names that come and go while the engine runs. In the front end, thread-safe."""

    def all(self) -> Sequence[ModelVariant]:
        """Those there are now, to be listed."""
        ...

    def find(self, name: str) -> ModelVariant | None:
        """Return one by name, also one that is not listed yet but can be had; None: nobody knows it."""
        ...
