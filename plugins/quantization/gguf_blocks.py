"""GGUF's encodings, taken apart: from the bytes of blocks to codes, scales and minimums.

Each function takes rows of blocks, uint8 [out, bytes a row], and returns the weight they are of. What a block's bytes
mean stands in `headrace.models.gguf.dequantize` and `headrace.models.gguf.k_quants`, which decode the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from headrace.core.interfaces.quantization import GroupedWeight

__all__ = ["UNPACKERS"]

BLOCK = 32
SUPERBLOCK = 256


def _blocks(encoded: torch.Tensor, size: int) -> torch.Tensor:
    """[out, bytes] -> [out, blocks, size]."""
    return encoded.view(encoded.shape[0], -1, size)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, [out, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[…, n] bytes -> […, 2 · n] codes: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(field: torch.Tensor) -> torch.Tensor:
    """[…, 4] bytes -> […, 32] bits, lowest first, each worth 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits: torch.Tensor = (field[..., None] >> shifts) & 1
    return bits.flatten(-2) << 4


def _q4_0(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 18)
    return GroupedWeight(_nibbles(blocks[..., 2:]).flatten(1), 4, 8, BLOCK, _half(blocks, 0))


def _q4_1(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 20)
    codes = _nibbles(blocks[..., 4:]).flatten(1)
    return GroupedWeight(codes, 4, 0, BLOCK, _half(blocks, 0), _half(blocks, 2))


def _q5_0(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 22)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return GroupedWeight(codes.flatten(1), 5, 16, BLOCK, _half(blocks, 0))


def _q5_1(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return GroupedWeight(codes.flatten(1), 5, 0, BLOCK, _half(blocks, 0), _half(blocks, 2))


def _q8_0(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 34)
    # Signed bytes become codes from 0 on, with 128 for zero.
    return GroupedWeight((blocks[..., 2:] ^ 128).flatten(1), 8, 128, BLOCK, _half(blocks, 0))


def _spread(field: torch.Tensor, width: int, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """[out, blocks, n] bytes -> [out, blocks, n · shifts]: of each `width` bytes those bits, shift by shift."""
    rows = field.unflatten(-1, (-1, 1, width))
    steps = torch.tensor(shifts, dtype=torch.uint8).view(-1, 1)
    values: torch.Tensor = (rows >> steps) & mask
    return values.flatten(2)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minimums of 6 bits out of 12 bytes, [out, blocks · 8] each."""
    first, second, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (both & 15) | ((first >> 2) & 48)], dim=-1)
    minimums = torch.cat([second & 63, (both >> 4) | ((second >> 2) & 48)], dim=-1)
    return scales.flatten(1), minimums.flatten(1)


def _q4_k(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 144)
    codes = _spread(blocks[..., 16:], 32, (0, 4), 15)
    scales, minimums = _k_scales(blocks)
    return GroupedWeight(codes.flatten(1), 4, 0, BLOCK, scales, minimums, _half(blocks, 0), _half(blocks, 2))


def _q5_k(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 176)
    fifth = _spread(blocks[..., 16:48], 32, tuple(range(8)), 1)
    codes = _spread(blocks[..., 48:], 32, (0, 4), 15) | (fifth << 4)
    scales, minimums = _k_scales(blocks)
    return GroupedWeight(codes.flatten(1), 5, 0, BLOCK, scales, minimums, _half(blocks, 0), _half(blocks, 2))


def _q6_k(encoded: torch.Tensor) -> GroupedWeight:
    blocks = _blocks(encoded, 210)
    upper = _spread(blocks[..., 128:192], 32, (0, 2, 4, 6), 3)
    codes = _spread(blocks[..., :128], 64, (0, 4), 15) | (upper << 4)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return GroupedWeight(codes.flatten(1), 6, 32, BLOCK // 2, scales, block_scales=_half(blocks, 208))


UNPACKERS: Mapping[str, Callable[[torch.Tensor], GroupedWeight]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""By the name of the encoding: those that run packed."""
