"""Writes safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

__all__ = ["write_tensors"]

ENCODINGS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int8: "I8",
        torch.uint8: "U8",
    }
)
ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name into one file, whole or not at all: it gets its name when it is complete.

    Raises `OSError`, and `ValueError` for a type that such files do not hold.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in ENCODINGS:
            raise ValueError(f"tensor {name!r} is of {tensor.dtype}; known: {', '.join(map(str, ENCODINGS))}")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": ENCODINGS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    unfinished.replace(path)
