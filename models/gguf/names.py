"""From GGUF's names of tensors to Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.models.gguf.architectures import ARCHITECTURES, Architecture

__all__ = ["architecture_of", "tensor_name"]

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([^.]+)(?:\.(weight|bias))?")


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> Architecture:
    """Return the file's architecture. Raises `CheckpointError` listing the known ones."""
    name = metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise CheckpointError(
            f"{path}: general.architecture is {name!r}; GGUF architectures known: {', '.join(ARCHITECTURES)}"
        )
    return known


def tensor_name(architecture: Architecture, name: str) -> tuple[str, str | None]:
    """Return (Hugging Face's name, config key with the number of heads whose rows are permuted, or None).

    A name the table does not know stays as it is, to be reported as left over once the model is built.
    """
    if name in architecture.tensors:
        return architecture.tensors[name], None
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in architecture.layer_tensors:
        return name, None
    own = architecture.layer_tensors[match[2]]
    kind = "" if own.endswith("inv_freq") else f".{match[3]}"
    return f"model.layers.{match[1]}.{own}{kind}", architecture.permuted.get(match[2])
