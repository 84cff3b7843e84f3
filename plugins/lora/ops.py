"""The op set `lora`: what adapters add to products, by native kernels; and the same in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from headrace.backends.cpu.build import KernelBuildError, build_kernels, kernel_headers
from headrace.backends.cpu.isa import ISA_VARIABLE, choose_tier
from headrace.backends.cpu.library import DTYPES, KernelLibrary
from headrace.core.errors import ConfigError
from headrace.core.interfaces import AttentionBackend, GraphRecorder, LinearFormat, Op
from headrace.plugins.lora.adapter import unpacked_a, unpacked_b
from headrace.plugins.lora.kernels import KERNELS, kernel_sources
from headrace.plugins.lora.modules import Product
from headrace.plugins.lora.slots import RowPlan, Slots

__all__ = ["EXPAND", "SHRINK", "NativeLora", "TorchLora"]

SHRINK = "lora_shrink"
"""(x [N, in], most, product, slots, rows) -> h [N, names · most] float32: x Aᵀ in the rows that have an adapter.

`most`: room in h for the ranks of a name. Call it right before the product whose sums go to `EXPAND`."""
EXPAND = "lora_expand"
"""(h, sums [N, S] float32, most, product, slots, rows, dtype) -> None: sums += h B; dtype is the matrices'."""

logger = logging.getLogger("headrace")

_SIGNATURES = {"lora_shrink": "PIIPPIPIIIP", "lora_expand": "PPIPPIPIIIPI"}


class NativeLora:
    """Native kernels, compiled when an engine with adapters starts for the first time."""

    name = "lora"

    @cached_property
    def _opened(self) -> KernelLibrary | str:
        tier = choose_tier()
        if tier is None:
            return f"{ISA_VARIABLE} is 'torch'"
        try:
            path = build_kernels(kernel_sources(), tier, name=KERNELS, headers=kernel_headers())
            return KernelLibrary(path, _SIGNATURES)
        except KernelBuildError as error:
            logger.warning("adapters run without native kernels, which is slow: %s", error)
            return str(error)

    def _kernels(self) -> KernelLibrary:
        if isinstance(self._opened, str):
            raise ConfigError(f"the native kernels of adapters cannot run: {self._opened}")
        return self._opened

    @cached_property
    def _ops(self) -> dict[str, Op]:
        kernels = self._kernels()
        functions = _Native(kernels)
        return {
            name: Op(name, function, row_invariant=True, recorded=kernels)
            for name, function in ((SHRINK, functions.shrink), (EXPAND, functions.expand))
        }

    @property
    def numerics(self) -> str:
        """Tier, and hashes of sources and compiler."""
        return self._kernels().numerics

    def why_not(self, device: str, dtype: str) -> list[str]:
        """Reasons why it cannot serve; empty: it can."""
        reasons = [] if device == "cpu" else [f"device {device} (runs on: cpu)"]
        if dtype not in DTYPES:
            reasons.append(f"dtype {dtype} (computes in: {', '.join(DTYPES)})")
        return reasons

    def get(self, name: str) -> Op | None:
        """Return an op, or None; nothing is compiled before somebody asks for one of them."""
        if name not in (SHRINK, EXPAND) or isinstance(self._opened, str):
            return None
        return self._ops[name]

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """None: the recorder of the op set `cpu` notes these kernels."""
        return None

    def linear(self, format: str) -> LinearFormat | None:
        """None: products are others'."""
        return None


class _Native:
    def __init__(self, kernels: KernelLibrary) -> None:
        self._shrink = kernels.by_type("lora_shrink")
        self._expand = kernels.by_type("lora_expand")

    def shrink(
        self, x: torch.Tensor, most: int, product: Product, slots: Slots, rows: RowPlan
    ) -> torch.Tensor:
        names, table = len(product.names), slots.table
        h = x.new_empty((x.shape[0], names * most), dtype=torch.float32)
        self._shrink[x.dtype](
            x.data_ptr(),
            x.stride(0),
            product.in_features,
            rows.starts.data_ptr(),
            rows.rows.data_ptr(),
            table.shape[0],
            table.ctypes.data + 8 * product.offset,
            table.shape[1],
            names,
            most,
            h.data_ptr(),
        )
        return h

    def expand(
        self,
        h: torch.Tensor,
        sums: torch.Tensor,
        most: int,
        product: Product,
        slots: Slots,
        rows: RowPlan,
        dtype: torch.dtype,
    ) -> None:
        table = slots.table
        self._expand[dtype](
            h.data_ptr(),
            sums.data_ptr(),
            sums.stride(0),
            rows.starts.data_ptr(),
            rows.rows.data_ptr(),
            table.shape[0],
            table.ctypes.data + 8 * product.offset,
            table.shape[1],
            len(product.names),
            most,
            product.pieces_table.ctypes.data,
            len(product.pieces),
        )


class TorchLora:
    """The reference, on any device."""

    name = "lora_torch"
    numerics = "torch"

    def why_not(self, device: str, dtype: str) -> list[str]:
        """Empty: it serves whatever torch does."""
        return []

    def get(self, name: str) -> Op | None:
        """Return an op, or None."""
        functions: dict[str, Callable[..., Any]] = {SHRINK: _shrink, EXPAND: _expand}
        return Op(name, functions[name]) if name in functions else None

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """None: torch's calls are not recorded."""
        return None

    def linear(self, format: str) -> LinearFormat | None:
        """None: products are others'."""
        return None


def _shrink(x: torch.Tensor, most: int, product: Product, slots: Slots, rows: RowPlan) -> torch.Tensor:
    h = torch.zeros(x.shape[0], len(product.names) * most, device=x.device)
    for slot, adapter in enumerate(slots.held):
        packed = adapter.products.get(product.index) if adapter else None
        own = rows.of_slot(slot)
        if packed is None or not len(own):
            continue
        for name, (rank, a) in enumerate(zip(packed.ranks, packed.a, strict=True)):
            if a is not None:
                weight = unpacked_a(a, rank, product.in_features).float().to(x.device)
                h[own, name * most : name * most + rank] = x[own].float() @ weight.t()
    return h


def _expand(
    h: torch.Tensor,
    sums: torch.Tensor,
    most: int,
    product: Product,
    slots: Slots,
    rows: RowPlan,
    dtype: torch.dtype,
) -> None:
    for slot, adapter in enumerate(slots.held):
        packed = adapter.products.get(product.index) if adapter else None
        own = rows.of_slot(slot)
        if packed is None or not len(own):
            continue
        for piece, b in zip(product.pieces, packed.b, strict=True):
            rank = packed.ranks[piece.name]
            if b is not None:
                part = h[own, piece.name * most : piece.name * most + rank]
                added = part @ unpacked_b(b, piece.end - piece.start).float().to(h.device)
                sums[own[:, None], piece.columns.to(sums.device)] += added
