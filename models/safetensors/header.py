"""The header of a safetensors file, read and checked by our own code.

Format: 8 bytes, little-endian, the length of a JSON object that maps names to `dtype`, `shape` and `data_offsets`
(half open, counted from the end of the header); then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from headrace.core.errors import CheckpointError, nearest

__all__ = ["ITEM_SIZES", "TensorPlace", "read_header"]

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
    }
)
"""Bytes an element, by the format's name of a type."""

MAX_HEADER = 100 * 2**20
"""Longer headers are refused, as the format's own library does."""

MAX_AXES = 64
"""As many as torch handles; keeps the product of a shape small."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies."""

    name: str
    encoding: str
    shape: tuple[int, ...]
    start: int
    """In bytes, from the beginning of the file."""
    nbytes: int


def read_header(path: Path, data: memoryview) -> list[TensorPlace]:
    """Return the tensors of a file, in its order.

    data: the whole file. Everything is checked against its length first, so that time and memory are bounded by it.
    Raises `CheckpointError` naming file and fault.
    """
    if len(data) < 8:
        raise CheckpointError(f"{path} is cut off: it has {len(data)} bytes, a safetensors file at least 8")
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER):
        raise CheckpointError(
            f"{path} is damaged or cut off: its header is said to have {length} bytes, and {len(data) - 8} follow"
        )
    try:
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is no JSON object ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    places = [_place(path, name, entry, 8 + length, len(data)) for name, entry in header.items()]
    _check_overlap(path, places)
    return places


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _place(path: Path, name: str, entry: Any, base: int, size: int) -> TensorPlace:
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}: tensor {name!r:.200} is described by {entry!r:.100}, not by an object"
        )
    encoding, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(encoding, str) or encoding not in ITEM_SIZES:
        raise CheckpointError(
            f"{path}: tensor {name!r:.200} has the type {encoding!r:.50}"
            f"{nearest(str(encoding)[:50], ITEM_SIZES)}; types known: {', '.join(ITEM_SIZES)}"
        )
    if not _naturals(shape) or len(shape) > MAX_AXES or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: tensor {name!r:.200} has the shape {shape!r:.100} and the offsets {offsets!r:.100}; "
            f"both must be lists of natural numbers, the former of at most {MAX_AXES}, the latter of two"
        )
    start, end = offsets
    nbytes = math.prod(shape) * ITEM_SIZES[encoding]
    if end - start != nbytes or base + end > size:
        raise CheckpointError(
            f"{path} is damaged or cut off: tensor {name!r:.200} of shape {shape} and type {encoding} takes {nbytes} "
            f"bytes; its offsets are {offsets}, and the file has {max(0, size - base)} bytes of data"
        )
    return TensorPlace(name, encoding, tuple(shape), base + start, nbytes)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_overlap(path: Path, places: list[TensorPlace]) -> None:
    end, before = 0, ""
    for place in sorted(places, key=lambda place: (place.start, place.nbytes)):
        if place.nbytes and place.start < end:
            raise CheckpointError(
                f"{path} is damaged: tensors {before!r:.200} and {place.name!r:.200} overlap"
            )
        end, before = max(end, place.start + place.nbytes), place.name
