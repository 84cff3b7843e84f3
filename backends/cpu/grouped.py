"""Weights of few bits in panels, multiplied as they lie: the linear format `grouped`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from headrace.backends.cpu.format import PanelFormat
from headrace.backends.cpu.library import Functions, Kernels, pointer
from headrace.backends.cpu.panels import PANEL, interleaved
from headrace.core.errors import CheckpointError
from headrace.core.interfaces.quantization import GroupedWeight

__all__ = ["GroupedLinear"]

UNIT = 16
"""Inputs that are decoded together: groups are made of whole units."""
BITS = (4, 5, 6, 8)

_PLAIN = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_BLOCKS_WITH_MINIMUMS, _BLOCKS = 3, 4


class _Form(ctypes.Structure):
    """How a weight is packed; see grouped.h."""

    _fields_ = (
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("header_bytes", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("has_minimum", ctypes.c_int32),
    )


class _Sources(ctypes.Structure):
    """Where the tensors of a weight lie; see pack_grouped.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("codes", "scales", "minimums", "block_scales", "block_minimums")
    )


@dataclass(frozen=True)
class _Piece:
    """Outputs [start, start + form.outputs) of a product, packed alike."""

    form: _Form
    data: torch.Tensor
    bias: torch.Tensor | None
    """float32, padded to whole panels."""
    order: torch.Tensor | None
    start: int


@dataclass(frozen=True)
class _Packed:
    pieces: tuple[_Piece, ...]
    in_features: int
    out_features: int
    nbytes: int
    """Memory it takes."""


class GroupedLinear(PanelFormat[_Packed]):
    """Codes are numbers that bfloat16 holds exactly: they are multiplied and summed by group, then scaled in float32.

    Sums do not depend on the number of rows. Parts of a stack may differ in bits and groups.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels, "grouped", "grouped_logits")
        self._pack = kernels.by_name("pack_grouped")
        self._sums = kernels.by_type("group_sums")
        self._columns = kernels.by_type("columns")
        self._rows = kernels.by_type("grouped_rows")

    def prepare(self, weight: Sequence[GroupedWeight], bias: torch.Tensor | None) -> _Packed:
        """Pack the parts of a stack, those alike together. Raises `CheckpointError` for a form it does not know."""
        pieces, start = [], 0
        for part in _merged(weight):
            own = None if bias is None else bias[start : start + part.shape[0]]
            pieces.append(self._piece(part, own, start))
            start += part.shape[0]
        return _Packed(tuple(pieces), weight[0].shape[1], start, sum(piece.data.nbytes for piece in pieces))

    def _piece(self, weight: GroupedWeight, bias: torch.Tensor | None, start: int) -> _Piece:
        form = _form_of(weight)
        panels = -(-form.outputs // PANEL)
        data = self._arena.empty((panels * form.panel_bytes,), torch.uint8)
        kept = [
            None if tensor is None else tensor.contiguous()
            for tensor in (
                weight.codes,
                weight.scales,
                weight.minimums,
                weight.block_scales,
                weight.block_minimums,
            )
        ]
        sources = _Sources(*(pointer(tensor) for tensor in kept))
        self._pack(ctypes.addressof(sources), weight.shape[1], ctypes.addressof(form), data.data_ptr())
        if bias is not None:
            bias = F.pad(bias.float(), (0, panels * PANEL - form.outputs))
        return _Piece(form, data, bias, weight.order, start)

    def gated(
        self, weight: Sequence[GroupedWeight], bias: torch.Tensor | None, op: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Pack gate and up; return their product, gated by `op` in one go. None where they are not alike."""
        merged = _merged(weight)
        if op not in self._gates or len(merged) != 1:
            return None
        stacked = self.prepare([_turned(merged[0])], None if bias is None else interleaved(bias))
        return self._gated(stacked, replace(stacked, out_features=merged[0].shape[0] // 2), op)

    def _multiply(self, kernel: Functions, x: torch.Tensor, packed: _Packed, y: torch.Tensor) -> None:
        for piece in packed.pieces:
            form = piece.form
            given = x if piece.order is None else self._reordered(x, piece.order)
            if form.inputs != packed.in_features:
                given = F.pad(given, (0, form.inputs - packed.in_features))
            sums = self._summed(given, form) if form.has_minimum else None
            kernel[x.dtype](
                given.data_ptr(),
                given.shape[0],
                given.stride(0),
                pointer(sums),
                ctypes.addressof(form),
                piece.data.data_ptr(),
                min(form.outputs, packed.out_features),
                pointer(piece.bias),
                y.data_ptr() + piece.start * y.dtype.itemsize,
                packed.out_features,
            )

    def _summed(self, x: torch.Tensor, form: _Form) -> torch.Tensor:
        sums = x.new_empty((x.shape[0], form.inputs // form.group), dtype=torch.float32)
        self._sums[x.dtype](x.data_ptr(), x.shape[0], x.stride(0), form.inputs, form.group, sums.data_ptr())
        return sums

    def _reordered(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0], order.shape[0])
        self._columns[x.dtype](
            x.data_ptr(), x.shape[0], x.stride(0), order.data_ptr(), order.shape[0], y.data_ptr()
        )
        return y

    def rows(self, ids: torch.Tensor, prepared: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `ids` [N] int64 of a weight that is no stack, [N, in] in `dtype`."""
        (piece,) = prepared.pieces
        out = torch.empty((ids.shape[0], prepared.in_features), dtype=dtype)
        self._rows[dtype](
            ids.data_ptr(),
            ids.shape[0],
            ctypes.addressof(piece.form),
            piece.data.data_ptr(),
            prepared.in_features,
            out.data_ptr(),
        )
        return out if piece.order is None else torch.empty_like(out).index_copy_(1, piece.order, out)


def _merged(parts: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Put parts that are alike and follow each other together."""
    merged: list[list[GroupedWeight]] = []
    for part in parts:
        if merged and _alike(merged[-1][0], part):
            merged[-1].append(part)
        else:
            merged.append([part])
    return [alike[0] if len(alike) == 1 else _stacked(alike) for alike in merged]


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    def kind(weight: GroupedWeight) -> tuple[Any, ...]:
        types = (weight.scales, weight.minimums, weight.block_scales, weight.block_minimums)
        return (
            weight.bits,
            weight.zero,
            weight.group_size,
            weight.order is None,
            *(None if tensor is None else (tensor.dtype, *tensor.shape[1:]) for tensor in types),
        )

    same_order = one.order is None or (other.order is not None and torch.equal(one.order, other.order))
    return kind(one) == kind(other) and same_order


def _each(weight: GroupedWeight, change: Callable[[str], torch.Tensor]) -> GroupedWeight:
    """A weight whose tensors of outputs are what `change` makes of their names."""
    names = ("codes", "scales", "minimums", "block_scales", "block_minimums")
    changes: dict[str, Any] = {name: change(name) for name in names if getattr(weight, name) is not None}
    return replace(weight, **changes)


def _stacked(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    return _each(parts[0], lambda name: torch.cat([getattr(part, name) for part in parts]))


def _turned(weight: GroupedWeight) -> GroupedWeight:
    return _each(weight, lambda name: interleaved(getattr(weight, name)))


def _form_of(weight: GroupedWeight) -> _Form:
    """How a weight will lie. Raises `CheckpointError` where that is not known."""
    outputs, inputs = weight.shape
    whole = weight.group_size >= inputs
    group = -(-inputs // UNIT) * UNIT if whole else weight.group_size
    padded = group if whole else inputs
    if weight.bits not in BITS or group % UNIT or padded % group:
        raise CheckpointError(
            f"weights of {weight.bits} bits in groups of {weight.group_size} of {inputs} inputs cannot be "
            f"packed: bits may be {', '.join(map(str, BITS))}, groups a multiple of {UNIT} that divides the inputs, "
            "or all of them"
        )
    scale, blocks = _scale_kind(weight), 1
    if weight.block_scales is not None:
        blocks = padded // group // weight.block_scales.shape[1]
    header = {
        _BLOCKS_WITH_MINIMUMS: 4 * PANEL + 2 * PANEL * blocks,
        _BLOCKS: 2 * PANEL + PANEL * blocks,
    }.get(scale, PANEL * weight.scales.element_size() * (1 if weight.minimums is None else 2))
    return _Form(
        outputs=outputs,
        inputs=padded,
        group=group,
        groups=blocks,
        header_bytes=header,
        panel_bytes=padded // (group * blocks) * header + padded * PANEL * weight.bits // 8,
        bits=weight.bits,
        zero=weight.zero,
        scale=scale,
        has_minimum=int(weight.minimums is not None),
    )


def _scale_kind(weight: GroupedWeight) -> int:
    if weight.block_scales is not None:
        return _BLOCKS if weight.minimums is None else _BLOCKS_WITH_MINIMUMS
    return _PLAIN[weight.scales.dtype]
