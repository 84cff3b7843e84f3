"""How GGUF stores numbers: one table of encodings, each with its block's size and its decoder.

A tensor is a row of blocks; a block holds `elements` numbers in `bytes` bytes. A decoder turns encoded blocks
(uint8 [n, bytes]) into numbers (float32 [n, elements]); the order of its float32 operations is part of the format,
so that every reader gets the same bits. To add an encoding, write its decoder and add a line to `ENCODINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.models.gguf.k_quants import decode_q2_k, decode_q3_k, decode_q4_k, decode_q5_k, decode_q6_k

__all__ = ["ENCODINGS", "UNSUPPORTED", "Encoding", "decode_blocks"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 17
"""Numbers decoded at a time: half a megabyte of float32, which stays in a core's own cache."""


@dataclass(frozen=True)
class Encoding:
    """One way of storing numbers."""

    code: int
    """In the file."""
    name: str
    elements: int
    """Numbers a block."""
    bytes: int
    """Bytes a block."""
    decode: Callable[[Bytes, Floats], None]
    """(blocks uint8 [n, bytes], out float32 [n, elements]): fills `out`."""


def _view(blocks: Bytes, start: int, end: int, dtype: Any) -> npt.NDArray[Any]:
    """Reinterpret the bytes [start, end) of every block."""
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def _decode_f32(blocks: Bytes, out: Floats) -> None:
    out[:] = _view(blocks, 0, 4, "<f4")


def _decode_f16(blocks: Bytes, out: Floats) -> None:
    out[:] = _view(blocks, 0, 2, "<f2")


def _decode_bf16(blocks: Bytes, out: Floats) -> None:
    # The upper half of a float32.
    wide = _view(blocks, 0, 2, "<u2").astype(np.uint32)
    wide <<= 16
    out[:] = wide.view(np.float32)


def _decode_q8_0(blocks: Bytes, out: Floats) -> None:
    # float16 scale, 32 signed bytes.
    scale = _view(blocks, 0, 2, "<f2").astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), scale, out=out)


def _decode_q4_1(blocks: Bytes, out: Floats) -> None:
    # float16 scale, float16 minimum, 16 bytes: low nibbles are numbers 0-15, high nibbles 16-31.
    scale = _view(blocks, 0, 2, "<f2").astype(np.float32)
    minimum = _view(blocks, 2, 4, "<f2").astype(np.float32)
    packed = blocks[:, 4:]
    np.multiply(packed & 15, scale, out=out[:, :16])
    np.multiply(packed >> 4, scale, out=out[:, 16:])
    out += minimum


def _decode_q4_0(blocks: Bytes, out: Floats) -> None:
    # float16 scale, 16 bytes of nibbles as in Q4_1; 8 stands for zero.
    scale = _view(blocks, 0, 2, "<f2").astype(np.float32)
    packed = blocks[:, 2:]
    np.multiply((packed & 15).astype(np.int8) - np.int8(8), scale, out=out[:, :16])
    np.multiply((packed >> 4).astype(np.int8) - np.int8(8), scale, out=out[:, 16:])


def _five_bits(fifth: Bytes, packed: Bytes) -> npt.NDArray[np.uint8]:
    """[n, 32] numbers of 4 bytes with a fifth bit each and 16 bytes of nibbles."""
    bits = _view(fifth, 0, 4, "<u4") >> np.arange(32, dtype=np.uint32)
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=1)
    numbers: npt.NDArray[np.uint8] = nibbles | ((bits & 1).astype(np.uint8) << 4)
    return numbers


def _decode_q5_0(blocks: Bytes, out: Floats) -> None:
    # float16 scale, 4 bytes of fifth bits, 16 bytes of nibbles; 16 stands for zero.
    scale = _view(blocks, 0, 2, "<f2").astype(np.float32)
    np.multiply(_five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16), scale, out=out)


def _decode_q5_1(blocks: Bytes, out: Floats) -> None:
    # float16 scale, float16 minimum, 4 bytes of fifth bits, 16 bytes of nibbles.
    scale = _view(blocks, 0, 2, "<f2").astype(np.float32)
    minimum = _view(blocks, 2, 4, "<f2").astype(np.float32)
    np.multiply(_five_bits(blocks[:, 4:8], blocks[:, 8:]), scale, out=out)
    out += minimum


ENCODINGS: Mapping[int, Encoding] = MappingProxyType(
    {
        encoding.code: encoding
        for encoding in (
            Encoding(0, "F32", 1, 4, _decode_f32),
            Encoding(1, "F16", 1, 2, _decode_f16),
            Encoding(30, "BF16", 1, 2, _decode_bf16),
            Encoding(2, "Q4_0", 32, 18, _decode_q4_0),
            Encoding(3, "Q4_1", 32, 20, _decode_q4_1),
            Encoding(6, "Q5_0", 32, 22, _decode_q5_0),
            Encoding(7, "Q5_1", 32, 24, _decode_q5_1),
            Encoding(8, "Q8_0", 32, 34, _decode_q8_0),
            Encoding(10, "Q2_K", 256, 84, decode_q2_k),
            Encoding(11, "Q3_K", 256, 110, decode_q3_k),
            Encoding(12, "Q4_K", 256, 144, decode_q4_k),
            Encoding(13, "Q5_K", 256, 176, decode_q5_k),
            Encoding(14, "Q6_K", 256, 210, decode_q6_k),
        )
    }
)
"""By the code in the file."""

UNSUPPORTED: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
    }
)
"""Names of encodings the format has and this table has not, for errors."""


def decode_blocks(encoding: Encoding, encoded: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Decode contiguous blocks.

    encoded: uint8, any shape, a whole number of blocks.
    Returns a fresh flat tensor of `dtype`, rounded once, from float32.
    """
    blocks = encoded.reshape(-1, encoding.bytes)
    out = torch.empty(len(blocks) * encoding.elements, dtype=dtype)
    step = CHUNK_ELEMENTS // encoding.elements
    scratch = np.empty((min(step, len(blocks)), encoding.elements), np.float32)
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        numbers = scratch[: len(chunk)]
        # A damaged scale may be NaN or infinite: that is the logits' business, not a warning's.
        with np.errstate(all="ignore"):
            encoding.decode(chunk, numbers)
        at = start * encoding.elements
        out[at : at + numbers.size] = torch.from_numpy(numbers.reshape(-1))
    return out
