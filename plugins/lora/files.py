"""An adapter's folder on disk: what PEFT wrote there, read once, and named by what it holds."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headrace.core.errors import CheckpointError, RequestError
from headrace.models.safetensors.header import read_header

__all__ = ["AdapterFiles", "AdapterMissingError", "check_root", "digest_of", "read_files", "stamp"]

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order of preference."""
MAX_CONFIG = 2**20

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


class AdapterMissingError(RequestError):
    """There is nothing at an adapter's path."""


@dataclass(frozen=True)
class AdapterFiles:
    """What a folder holds."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    """By PEFT's names, as stored."""
    digest: str


def check_root(path: Path, roots: Sequence[Path]) -> None:
    """Raise `RequestError` for a path that is below none of `roots`, links followed; none: any path will do."""
    real = path.expanduser().resolve()
    if roots and not any(real == root or root in real.parents for root in roots):
        raise RequestError(
            f"the adapter's path {str(path)!r:.300} is outside of the folders that are allowed: "
            f"{', '.join(map(str, roots))} (lora_roots)",
            param="lora_path",
        )


def stamp(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes when an adapter's files do, without reading them. Raises `AdapterMissingError`."""
    found = []
    for file in _files(path):
        status = file.stat()
        found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def digest_of(path: Path) -> str:
    """Return the name of an adapter's content. Raises `AdapterMissingError`, or `RequestError` naming a file."""
    return _digest([_read(file) for file in _files(path)])


def read_files(path: Path) -> AdapterFiles:
    """Read an adapter's folder. Raises `AdapterMissingError`, or `RequestError` naming file and fault."""
    files = _files(path)
    data = [_read(file) for file in files]
    config = _config(files[0], data[0])
    try:
        tensors = (
            _safetensors(files[1], data[1])
            if files[1].suffix == ".safetensors"
            else _pickled(files[1], data[1])
        )
    except CheckpointError as error:
        raise RequestError(str(error), param="lora_path") from None
    return AdapterFiles(path, config, tensors, _digest(data))


def _files(path: Path) -> tuple[Path, Path]:
    """Return configuration and weights."""
    folder = path.expanduser()
    if not folder.is_dir():
        raise AdapterMissingError(
            f"no adapter at {str(path)!r:.300}: there is no such folder", param="lora_path"
        )
    if not (folder / CONFIG).is_file():
        raise RequestError(f"{folder} is no adapter: it has no {CONFIG}", param="lora_path")
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / CONFIG, folder / name
    raise RequestError(
        f"{folder} has no weights of an adapter; looked for: {', '.join(WEIGHTS)}", param="lora_path"
    )


def _read(file: Path) -> bytearray:
    try:
        with file.open("rb") as opened:
            data = bytearray(file.stat().st_size)
            count = opened.readinto(data)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}", param="lora_path") from None
    del data[count:]
    return data


def _digest(parts: Sequence[bytearray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


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
