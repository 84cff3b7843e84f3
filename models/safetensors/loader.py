"""The loader of Hugging Face folders: safetensors, single or in shards, mapped and read when asked for."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from headrace.core.errors import CheckpointError
from headrace.core.interfaces import CheckpointTensor
from headrace.models.safetensors.folder import chat_template, read_json, tokenizer_files
from headrace.models.safetensors.header import TensorPlace, read_header

__all__ = ["SafetensorsCheckpoint", "SafetensorsLoader", "SafetensorsTensor"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)


class _Shard:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                # A private copy-on-write map: torch wants memory it could write to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        self.places = read_header(path, memoryview(self._map or b""))

    def bytes_of(self, place: TensorPlace) -> torch.Tensor:
        """Return a tensor's bytes, uint8: a view of the map."""
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed before tensor {place.name!r} was read")
        if not place.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=place.nbytes, offset=place.start)

    def close(self) -> None:
        # Dropped, not closed: the map goes with the last view of it.
        self._map = None


class SafetensorsTensor:
    """One tensor; see `headrace.core.interfaces.CheckpointTensor`."""

    def __init__(self, shard: _Shard, place: TensorPlace) -> None:
        self._shard = shard
        self._place = place
        self.name = place.name
        self.shape = place.shape
        self.encoding = place.encoding

    def read(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return the bytes of some rows: uint8 [rows, bytes a row], a copy."""
        count = self.shape[0] if self.shape else 1
        return self._shard.bytes_of(self._place).view(count, -1)[rows].clone()

    def decode(self, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """Return some rows in `dtype`; a fresh tensor. Other rows are not read."""
        values = self._shard.bytes_of(self._place).view(DTYPES[self.encoding]).view(self.shape)
        return (values[rows] if self.shape else values).to(dtype, copy=True)


class SafetensorsCheckpoint:
    """An opened folder; see `headrace.core.interfaces.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        self.path = folder
        config = read_json(folder / "config.json")
        _require_architectures(folder, config)
        generation = folder / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(generation) if generation.is_file() else {}
        self.chat_template: str | None = chat_template(folder)
        self.tokenizer: Mapping[str, Any] | None = tokenizer_files(folder, config, self.generation_config)
        self._shards = [_Shard(path)] if path.is_file() else _open_shards(folder)
        self.tensors: Mapping[str, CheckpointTensor] = _tensors(self._shards)
        if not (config.get("dtype") or config.get("torch_dtype")):
            config["dtype"] = _stored_dtype(self.tensors.values())
        self.config: Mapping[str, Any] = config
        """As in config.json; `dtype`, where it is not there, is what most of the weights are stored as."""

    def close(self) -> None:
        """Let go of the files; tensors decoded before stay valid."""
        for shard in self._shards:
            shard.close()


def _tensors(shards: list[_Shard]) -> dict[str, CheckpointTensor]:
    found: dict[str, CheckpointTensor] = {}
    homes: dict[str, Path] = {}
    for shard in shards:
        for place in shard.places:
            if place.name in found:
                raise CheckpointError(
                    f"tensor {place.name!r} stands in {homes[place.name]} and again in {shard.path}"
                )
            found[place.name] = SafetensorsTensor(shard, place)
            homes[place.name] = shard.path
    return found


def _stored_dtype(tensors: Iterable[CheckpointTensor]) -> str | None:
    """Return the type that most numbers have; None where none is of a type that models compute in."""
    counts = {"F32": 0, "F16": 0, "BF16": 0}
    for tensor in tensors:
        if tensor.encoding in counts:
            counts[tensor.encoding] += math.prod(tensor.shape)
    most = max(counts, key=counts.__getitem__)
    return str(DTYPES[most]).removeprefix("torch.") if counts[most] else None


def _open_shards(folder: Path) -> list[_Shard]:
    """Open the one file, or all that the index names; the index and the shards must agree."""
    index = folder / INDEX
    if not index.is_file():
        return [_Shard(folder / SINGLE)]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensors to files, got {weight_map!r:.100}")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{index} names the shard {name!r}, which is not in the folder")
    shards = [_Shard(folder / name) for name in names]
    held = {place.name for shard in shards for place in shard.places}
    missing = sorted(weight_map.keys() - held)
    if missing:
        raise CheckpointError(f"{index} names tensors that no shard holds: {', '.join(missing[:5])}")
    return shards


def _require_architectures(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that does not say what model it is of, while the file's name is at hand."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures must be a list of class names such as ['LlamaForCausalLM'], "
            f"got {names!r:.100}"
        )


class SafetensorsLoader:
    """Opens folders with config.json and safetensors, or one such file beside its config.json."""

    name = "safetensors"

    def claims(self, path: Path) -> bool:
        """Whether it is a Hugging Face folder, or a .safetensors file in one."""
        if path.is_dir():
            return (path / "config.json").is_file() or any(
                (path / name).is_file() for name in (SINGLE, INDEX)
            )
        return path.suffix == ".safetensors"

    def open(self, path: Path) -> SafetensorsCheckpoint:
        """Open it. Raises `CheckpointError` naming file and fault."""
        folder = path if path.is_dir() else path.parent
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json, which says what model the weights are")
        if path.is_dir() and not any((path / name).is_file() for name in (SINGLE, INDEX)):
            raise CheckpointError(f"{path} has no {SINGLE} and no {INDEX}{_advice(path)}")
        return SafetensorsCheckpoint(path)


def _advice(folder: Path) -> str:
    """Say what to do with the weights that a folder has instead."""
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    readable = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if readable:
        return f"; give the path of a file instead: {', '.join(readable[:5])}"
    pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return (
            f"; {', '.join(pickled[:3])} would run code when opened and is not read: convert it with "
            "transformers, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return ""
