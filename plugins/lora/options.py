"""The options of LoRA adapters: the section `lora` of the configuration, and what travels with a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, model_validator

from headrace.core.config import Section, option
from headrace.core.stash import StashKey

__all__ = ["LORA", "AdapterRef", "LoraSection"]


def _modules(value: Any) -> Any:
    """Read `name=path` texts, as flags have them."""
    if isinstance(value, str):
        value = value.split()
    if isinstance(value, Sequence):
        pairs = [item.partition("=") if isinstance(item, str) else ("", "", "") for item in value]
        if not all(name and path for name, _, path in pairs):
            raise ValueError("must map names to folders, or be a list of texts name=path")
        return {name: path for name, _, path in pairs}
    if isinstance(value, Mapping):
        return {name: str(path) if isinstance(path, Path) else path for name, path in value.items()}
    return value


class LoraSection(Section):
    """Which adapters there are, and how many at a time."""

    modules: Annotated[dict[str, str], BeforeValidator(_modules)] = option(
        {},
        "Adapters by name: folders that PEFT wrote. As a flag: a JSON object, or texts name=path.",
        flat="lora_modules",
        aliases=("adapters",),
    )
    folder: str | None = option(
        None,
        "Folder whose folders are adapters: one that is asked for by its name is loaded then.",
        flat="lora_folder",
    )
    loading: bool = option(
        False,
        "Offer routes that load and unload adapters.",
        flat="enable_lora_loading",
        aliases=("enable_lora",),
    )
    roots: list[str] = option(
        [],
        "Folders below which adapters to be loaded at run time must lie; default: lora_folder, or anywhere.",
        flat="lora_roots",
    )
    max_loras: int = option(4, "Most adapters in one step.", ge=1, le=256)
    max_lora_rank: int = option(64, "Largest rank of an adapter.", ge=1, le=1024)
    max_cpu_loras: int = option(16, "Adapters kept in memory, those in use among them.", ge=1)

    @model_validator(mode="after")
    def _enough_memory(self) -> LoraSection:
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) must not be below max_loras ({self.max_loras}): those of a "
                "step are in memory"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether there are adapters, or can be."""
        return bool(self.modules or self.folder or self.loading)

    def allowed_roots(self) -> list[Path]:
        """Folders below which adapters of the run time lie; none: anywhere."""
        given = self.roots or ([self.folder] if self.folder else [])
        return [Path(root).expanduser().resolve() for root in given]


class AdapterRef(msgspec.Struct, frozen=True):
    """One version of an adapter."""

    name: str
    path: str
    digest: str
    """SHA-256 of its configuration and weights, in hexadecimal digits."""
    found: bool = False
    """It was found in `lora_folder`, and nobody loaded it by name."""


LORA: StashKey[AdapterRef] = StashKey("lora/adapter", AdapterRef, direction="request")
"""Of requests that ask for an adapter: the version they began with."""
