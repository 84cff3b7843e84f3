"""The K encodings of GGUF: blocks of 256 numbers in groups of 16 or 32, with scales that are quantized themselves.

Each decoder takes blocks (uint8 [n, bytes]) and fills `out` (float32 [n, 256]); the order of float32 operations is
the format's. Bits of one number are spread over several fields; the comments give a block's fields in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["decode_q2_k", "decode_q3_k", "decode_q4_k", "decode_q5_k", "decode_q6_k"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of every block, [n, 1] float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _spread(
    field: Bytes, width: int, shifts: tuple[int, ...], mask: int, group: int
) -> npt.NDArray[np.uint8]:
    """Take numbers of a few bits out of a field, [n, groups, group].

    The field is read in rows of `width` bytes; each row gives one row of numbers for every shift.
    """
    rows = field.reshape(len(field), -1, 1, width)
    steps = np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)
    values: npt.NDArray[np.uint8] = ((rows >> steps) & np.uint8(mask)).reshape(len(field), -1, group)
    return values


def _fill(out: Floats, values: npt.NDArray[Any]) -> None:
    out[:] = values.reshape(out.shape)


def decode_q2_k(blocks: Bytes, out: Floats) -> None:
    """16 bytes of 4-bit scales and minimums, 64 bytes of 2-bit numbers, float16 scale, float16 minimum."""
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & 15).astype(np.float32))[:, :, None]
    minimum = (_half(blocks, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    numbers = _spread(blocks[:, 16:80], 32, (0, 2, 4, 6), 3, 16)
    _fill(out, scale * numbers - minimum)


def decode_q3_k(blocks: Bytes, out: Floats) -> None:
    """32 bytes of third bits, 64 bytes of lower two, 12 bytes of 6-bit scales, float16 scale."""
    low = _spread(blocks[:, 96:104], 8, (0, 4), 15, 16)[:, 0]
    high = _spread(blocks[:, 104:108], 4, (0, 2, 4, 6), 3, 16)[:, 0]
    scales = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scale = (_half(blocks, 108) * scales.astype(np.float32))[:, :, None]
    lower = _spread(blocks[:, 32:96], 32, (0, 2, 4, 6), 3, 16).astype(np.int8)
    # A third bit that is not set takes 4 off.
    missing = (_spread(blocks[:, :32], 32, tuple(range(8)), 1, 16) ^ 1).astype(np.int8)
    _fill(out, scale * (lower - (missing << 2)).astype(np.float32))


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Q4_K, Q5_K: float16 scale, float16 minimum, 12 bytes with eight 6-bit scales and minimums; [n, 8, 1] each."""
    first, second, both = np.split(blocks[:, 4:16].reshape(-1, 3, 4), 3, axis=1)
    scales = np.concatenate([first & 63, (both & 15) | ((first >> 2) & 48)], axis=-1).reshape(-1, 8)
    minimums = np.concatenate([second & 63, (both >> 4) | ((second >> 2) & 48)], axis=-1).reshape(-1, 8)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minimums.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def decode_q4_k(blocks: Bytes, out: Floats) -> None:
    """Scales and minimums, then 128 bytes of 4-bit numbers."""
    scale, minimum = _scales_and_minimums(blocks)
    numbers = _spread(blocks[:, 16:], 32, (0, 4), 15, 32)
    _fill(out, scale * numbers.astype(np.float32) - minimum)


def decode_q5_k(blocks: Bytes, out: Floats) -> None:
    """Scales and minimums, 32 bytes of fifth bits, 128 bytes of lower four."""
    scale, minimum = _scales_and_minimums(blocks)
    fifth = _spread(blocks[:, 16:48], 32, tuple(range(8)), 1, 32)
    numbers = _spread(blocks[:, 48:], 32, (0, 4), 15, 32) | (fifth << 4)
    _fill(out, scale * numbers.astype(np.float32) - minimum)


def decode_q6_k(blocks: Bytes, out: Floats) -> None:
    """128 bytes of lower four bits, 64 bytes of upper two, 16 signed scales, float16 scale."""
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    scale = (_half(blocks, 208) * scales.astype(np.float32))[:, :, None]
    lower = _spread(blocks[:, :128], 64, (0, 4), 15, 32)
    upper = _spread(blocks[:, 128:192], 32, (0, 2, 4, 6), 3, 32)
    numbers = (lower | (upper << 4)).astype(np.int8) - np.int8(32)
    _fill(out, scale * numbers.reshape(len(blocks), 16, 16).astype(np.float32))
