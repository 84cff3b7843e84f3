"""The GGUF header, read in one pass over a memory map.

Layout (little endian, versions 2 and 3): magic, version u32, tensor count u64, key count u64; the keys (string,
type u32, value); the tensors (name, dimension count u32, dimensions u64, encoding u32, offset u64); padding; data.
A string is a u64 length and its bytes; an array a type u32, a count u64 and its values.

Every length, count and offset is held against the file's size before it is believed, so that a damaged file costs
no more time or memory than an intact one. Long arrays are stepped over and decoded when asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.models.gguf.dequantize import ENCODINGS, UNSUPPORTED, Encoding

__all__ = ["MAGIC", "ArrayValue", "Header", "TensorInfo", "read_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
MAX_NAME = 65_535
MAX_STRINGS = 1 << 23
MAX_DIMENSIONS = 4

_SCALARS: Mapping[int, tuple[struct.Struct, str]] = MappingProxyType(
    {
        0: (struct.Struct("<B"), "<u1"),
        1: (struct.Struct("<b"), "<i1"),
        2: (struct.Struct("<H"), "<u2"),
        3: (struct.Struct("<h"), "<i2"),
        4: (struct.Struct("<I"), "<u4"),
        5: (struct.Struct("<i"), "<i4"),
        6: (struct.Struct("<f"), "<f4"),
        7: (struct.Struct("<?"), "?"),
        10: (struct.Struct("<Q"), "<u8"),
        11: (struct.Struct("<q"), "<i8"),
        12: (struct.Struct("<d"), "<f8"),
    }
)
"""Value types: how one is read, and numpy's name for many."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies."""

    name: str
    """As the file spells it."""
    shape: tuple[int, ...]
    """Rows first (the file has the reverse)."""
    encoding: Encoding
    start: int
    """Its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class ArrayValue:
    """An array of the header: checked to lie within the file, and decoded when asked for."""

    path: Path
    key: str
    type: int
    count: int
    start: int
    """Its first value's first byte in the file."""
    end: int

    def load(self, data: mmap.mmap) -> list[Any]:
        """Return the values, out of the mapped file. Raises `CheckpointError` for strings that are not UTF-8."""
        if self.type != STRING:
            numbers: list[Any] = np.frombuffer(data, _SCALARS[self.type][1], self.count, self.start).tolist()
            return numbers
        # Cut from a copy (slices of a map are slow), and decoded in one go.
        copy, unpack, at = data[self.start : self.end], _U64.unpack_from, 0
        raw: list[bytes] = []
        for _ in range(self.count):
            start = at + 8
            at = start + unpack(copy, at)[0]
            raw.append(copy[start:at])
        try:
            values = b"\0".join(raw).decode().split("\0")
            return values if len(values) == self.count else [value.decode() for value in raw]
        except UnicodeDecodeError as error:
            piece = error.object[error.start :][:20]
            raise CheckpointError(f"{self.path}: a string of {self.key!r} is not UTF-8: {piece!r}") from error


@dataclass(frozen=True)
class Header:
    """What the front of the file says."""

    version: int
    metadata: Mapping[str, Any]
    """Scalars and strings as they are, arrays as `ArrayValue`."""
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path, data: mmap.mmap) -> Header:
    """Read the header of a mapped file. Raises `CheckpointError` naming `path` and what is wrong."""
    return _HeaderReader(path, data).read()


class _HeaderReader:
    """A position in the file, and what may be read from it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def read(self) -> Header:
        magic = self.data[:4]
        if magic != MAGIC:
            raise self.error(f"it is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.at = 4
        version = self.number(_U32, "the version")
        if version not in VERSIONS:
            raise self.error(f"it has GGUF version {version}; versions read here: 2, 3 (little endian)")
        num_tensors = self.number(_U64, "the tensor count")
        num_keys = self.number(_U64, "the key count")
        self.check_count(num_keys, 13, "keys")
        self.check_count(num_tensors, 24, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a key", MAX_NAME)
            if key in metadata:
                raise self.error(f"the key {key!r} comes twice")
            metadata[key] = self.value(key)
        entries = [self.tensor() for _ in range(num_tensors)]
        return Header(version, MappingProxyType(metadata), self.place(metadata, entries))

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def check_count(self, count: int, least: int, what: str) -> None:
        """Refuse a count of things, each of at least `least` bytes, that the rest of the file cannot hold."""
        left = self.size - self.at
        if count * least > left:
            raise self.error(f"the header claims {count} {what}, more than its last {left} bytes can hold")

    def number(self, kind: struct.Struct, what: str) -> Any:
        if self.at + kind.size > self.size:
            raise self.error(f"the file ends at byte {self.size}, inside {what}; it was cut short")
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number(_U64, f"the length of {what}")
        if limit is not None and length > limit:
            raise self.error(
                f"{what} at byte {self.at} claims a length of {length} bytes; at most {limit} make sense"
            )
        if length > self.size - self.at:
            raise self.error(
                f"{what} at byte {self.at} claims {length} bytes, of which {self.size - self.at} are there"
            )
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {self.at - length} is not UTF-8: {raw[:40]!r}") from error

    def value(self, key: str) -> Any:
        kind = self.number(_U32, f"the type of {key!r}")
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind == ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.error(f"the key {key!r} has the unknown value type {kind}; known: 0 to 12")
        return self.number(_SCALARS[kind][0], f"the value of {key!r}")

    def array(self, key: str) -> ArrayValue:
        kind = self.number(_U32, f"the type of {key!r}")
        count = self.number(_U64, f"the count of {key!r}")
        if kind == STRING:
            return self.strings(key, count)
        if kind not in _SCALARS:
            known = "numbers, booleans and strings"
            raise self.error(
                f"the key {key!r} is an array of value type {kind}; arrays read here hold {known}"
            )
        itemsize = _SCALARS[kind][0].size
        self.check_count(count, itemsize, f"values of {key!r}")
        start = self.at
        self.at += count * itemsize
        return ArrayValue(self.path, key, kind, count, start, self.at)

    def strings(self, key: str, count: int) -> ArrayValue:
        self.check_count(count, 8, f"strings of {key!r}")
        if count > MAX_STRINGS:
            raise self.error(f"the key {key!r} claims {count} strings; at most {MAX_STRINGS} make sense")
        # The one hot loop of a header: a vocabulary and its merges are some 100,000 strings, and each one's
        # place depends on the length of the one before.
        data, size, unpack = self.data, self.size, _U64.unpack_from
        at = start = self.at
        try:
            for _ in range(count):
                at += unpack(data, at)[0] + 8
        except (struct.error, OverflowError):
            at = size + 1
        if at > size:
            raise self.error(
                f"the file ends at byte {size}, inside the strings of {key!r}; cut short or damaged"
            )
        self.at = at
        return ArrayValue(self.path, key, STRING, count, start, at)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read one tensor's entry: name, shape, encoding's code, offset in the data part."""
        name = self.string("a tensor's name", MAX_NAME)
        num_dims = self.number(_U32, f"the dimension count of {name!r}")
        if num_dims > MAX_DIMENSIONS:
            raise self.error(
                f"tensor {name!r} claims {num_dims} dimensions; at most {MAX_DIMENSIONS} are allowed"
            )
        dims = [self.number(_U64, f"the shape of {name!r}") for _ in range(num_dims)]
        code = self.number(_U32, f"the type of {name!r}")
        offset = self.number(_U64, f"the offset of {name!r}")
        return name, tuple(reversed(dims)), code, offset

    def place(
        self, metadata: Mapping[str, Any], entries: list[tuple[str, tuple[int, ...], int, int]]
    ) -> tuple[TensorInfo, ...]:
        """Turn offsets into places in the file; they must lie in it, aligned and apart."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.error(f"general.alignment must be a power of two up to {1 << 20}; it is {alignment!r}")
        first = -(-self.at // alignment) * alignment
        tensors = [self.locate(name, shape, code, offset, first) for name, shape, code, offset in entries]
        names = {tensor.name for tensor in tensors}
        if len(names) != len(tensors):
            twice = next(name for name in names if sum(tensor.name == name for tensor in tensors) > 1)
            raise self.error(f"tensor {twice!r} comes twice")
        for tensor in tensors:
            if (tensor.start - first) % alignment:
                raise self.error(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
        in_order = sorted((t for t in tensors if t.nbytes), key=lambda tensor: tensor.start)
        for one, other in pairwise(in_order):
            if one.start + one.nbytes > other.start:
                raise self.error(f"tensors {one.name!r} and {other.name!r} overlap")
        return tuple(tensors)

    def locate(self, name: str, shape: tuple[int, ...], code: int, offset: int, first: int) -> TensorInfo:
        """Check one tensor by itself."""
        encoding = ENCODINGS.get(code)
        if encoding is None:
            found = UNSUPPORTED.get(code, f"number {code}")
            known = ", ".join(known.name for known in ENCODINGS.values())
            raise self.error(
                f"tensor {name!r} has the encoding {found}, which is not supported; supported: {known}"
            )
        if encoding.elements > 1 and (len(shape) < 2 or shape[-1] % encoding.elements):
            raise self.error(
                f"tensor {name!r} of shape {list(shape)} cannot be {encoding.name}: its rows are no whole number "
                f"of blocks of {encoding.elements}"
            )
        nbytes = prod(shape) // encoding.elements * encoding.bytes
        start = first + offset
        if nbytes and start + nbytes > self.size:
            raise self.error(
                f"tensor {name!r} of shape {list(shape)} lies at bytes {start} to {start + nbytes}, but the file "
                f"ends at {self.size}: it was cut short or is damaged"
            )
        return TensorInfo(name, shape, encoding, start, nbytes)
