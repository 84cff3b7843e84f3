"""An adapter's folder, read once: what PEFT wrote there."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headrace.core.errors import CheckpointError, RequestError
from headrace.models.safetensors.header import read_header
from headrace.plugins.lora.location import digest_of_bytes, files_of, read_bytes

__all__ = ["AdapterFiles", "read_files"]

MAX_CONFIG = 2**20

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


@dataclass(frozen=True)
class AdapterFiles:
    """What a folder holds."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    """By PEFT's names, as stored."""
    digest: str


def read_files(path: Path) -> AdapterFiles:
    """Read an adapter's folder. Raises `AdapterMissingError`, or `RequestError` naming file and fault."""
    files = files_of(path)
    data = [read_bytes(file) for file in files]
    config = _config(files[0], data[0])
    try:
        tensors = (
            _safetensors(files[1], data[1])
            if files[1].suffix == ".safetensors"
            else _pickled(files[1], data[1])
        )
    except CheckpointError as error:
        raise RequestError(str(error), param="lora_path") from None
    return AdapterFiles(path, config, tensors, digest_of_bytes(data))


def _config(file: Path, data: bytearray) -> Mapping[str, Any]:
    try:
        config = json.loads(bytes(data[:MAX_CONFIG]))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is no JSON: {error}", param="lora_path") from None
    if not isinstance(config, dict):
        raise RequestError(
            f"{file} must hold a JSON object, got a {type(config).__name__}", param="lora_path"
        )
    return config


def _safetensors(file: Path, data: bytearray) -> dict[str, torch.Tensor]:
    tensors = {}
    for place in read_header(file, memoryview(data)):
        dtype = _DTYPES.get(place.encoding)
        if dtype is None:
            raise RequestError(
                f"{file}: tensor {place.name!r:.200} has the type {place.encoding}; adapters have "
                f"{', '.join(_DTYPES)}",
                param="lora_path",
            )
        if place.nbytes:
            raw = torch.frombuffer(data, dtype=torch.uint8, count=place.nbytes, offset=place.start)
            # A tensor may begin anywhere in a file, numbers may not.
            tensors[place.name] = raw.clone().view(dtype).view(place.shape)
        else:
            tensors[place.name] = torch.empty(place.shape, dtype=dtype)
    return tensors


def _pickled(file: Path, data: bytearray) -> dict[str, torch.Tensor]:
    """Read what `torch.save` wrote, as far as that is possible without running code of it."""
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, AttributeError) as error:
        raise RequestError(
            f"{file} holds no plain tensors: {str(error).splitlines()[0]:.200}; save the adapter as safetensors",
            param="lora_path",
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.is_floating_point()
        for name, value in loaded.items()
    ):
        raise RequestError(f"{file} must map names to tensors of floats", param="lora_path")
    return loaded
