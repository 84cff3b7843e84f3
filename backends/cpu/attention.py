"""The attention backend `cpu`: native kernels over pages, one instruction family for chunks and decodes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from headrace.backends.cpu.ahead import PagesAhead
from headrace.backends.cpu.arena import Arena
from headrace.backends.cpu.library import DTYPES, Functions, Kernels, pointer
from headrace.backends.cpu.native import open_kernels, require
from headrace.core.interfaces.attention import AttentionBatch, AttentionLayer, AttentionSpec, CacheSpec
from headrace.core.interfaces.kv_cache import KVCacheGroup

__all__ = ["CpuAttention"]

LANES = 16
"""Keys, and numbers of a head, that one instruction serves."""
LARGEST_HEAD = 256
INT8 = "int8"
"""The KV dtype of whole numbers, with float32 scales for each token and head."""


@dataclass(frozen=True)
class _Cache:
    """A layer's pages, [blocks, KV heads, …], keys then values, as the kernels have them; and those kernels."""

    pages: torch.Tensor
    block_size: int
    kernels: _PageKernels


@dataclass(frozen=True)
class _PageKernels:
    """What writes to pages of one kind and attends over them."""

    write: Functions
    attention: Functions


@dataclass(frozen=True)
class _Native:
    """Kernels, and those of them that are called."""

    kernels: Kernels
    plain: _PageKernels
    """Of pages with numbers of the model's type."""
    int8: _PageKernels


class _StepFields(ctypes.Structure):
    """A step as kernels read it; see attention.cpp."""

    _fields_ = (
        ("query_start", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("requests", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
    )


class _Step:
    """A step's shape, copied: the runner reuses its memory. Its fields keep their address when it is set again."""

    def __init__(self) -> None:
        self.fields = _StepFields()
        self._kept: tuple[torch.Tensor, ...] = ()

    def set(self, batch: AttentionBatch) -> None:
        """Take in another batch."""
        starts, lengths = batch.query_start.clone(), batch.seq_lens.clone()
        tables, slots = (
            batch.block_table.clone(memory_format=torch.contiguous_format),
            batch.slot_mapping.clone(),
        )
        fields = self.fields
        fields.query_start, fields.lengths = starts.data_ptr(), lengths.data_ptr()
        fields.tables, fields.slots = tables.data_ptr(), slots.data_ptr()
        fields.table_stride, fields.requests, fields.tokens = (
            tables.shape[1],
            lengths.shape[0],
            slots.shape[0],
        )
        self._kept = (starts, lengths, tables, slots)


class CpuAttention:
    """Attention of bfloat16 or float32; a token's output depends on its own request alone, bit for bit."""

    name = "cpu"
    row_invariant = True
    graph: Literal["never", "decode", "always"] = "always"

    @cached_property
    def _opened(self) -> Kernels | str:
        return open_kernels()

    @cached_property
    def _native(self) -> _Native:
        kernels = require(self._opened)
        plain, int8 = (
            _PageKernels(kernels.by_type(f"kv_write{kind}"), kernels.by_type(f"attention{kind}"))
            for kind in ("", "_int8")
        )
        return _Native(kernels, plain, int8)

    @cached_property
    def _ahead(self) -> PagesAhead:
        return PagesAhead(self.kernels.touch, torch.get_num_threads())

    @property
    def kernels(self) -> Kernels:
        """What it computes with. Raises `ConfigError` where there is nothing."""
        return self._native.kernels

    @property
    def numerics(self) -> str:
        """Tier, and hashes of sources and compiler."""
        return self.kernels.numerics

    def why_not(self, spec: AttentionSpec, device: str) -> list[str]:
        """Reasons why it cannot serve `spec` on `device`; empty: it can."""
        reasons = []
        if device != "cpu":
            reasons.append(f"device {device} (runs on: cpu)")
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype {spec.dtype} (serves: {', '.join(DTYPES)})")
        elif spec.kv_dtype not in (spec.dtype, INT8):
            reasons.append(f"KV dtype {spec.kv_dtype} (serves: that of the model, {spec.dtype}, and {INT8})")
        if spec.head_dim % LANES or not 0 < spec.head_dim <= LARGEST_HEAD:
            reasons.append(f"head size {spec.head_dim} (serves: multiples of {LANES} up to {LARGEST_HEAD})")
        if spec.block_size < LANES or spec.block_size & (spec.block_size - 1):
            reasons.append(f"block size {spec.block_size} (serves: powers of two from {LANES} on)")
        if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads are no multiple of {spec.num_kv_heads} KV heads")
        if spec.window is not None and not spec.causal:
            reasons.append("a window in a layer that is not causal")
        if not reasons and isinstance(self._opened, str):
            reasons.append(self._opened)
        return reasons

    def layout(self, spec: AttentionSpec) -> CacheSpec:
        """K and V in the model's type, no padding; or in bytes, with two scales for each token and head."""
        return CacheSpec(page_bytes=spec.num_kv_heads * _head_bytes(spec))

    def allocate(self, spec: AttentionSpec, num_blocks: int, device: str) -> _Cache:
        """Pages for block ids [0, num_blocks); their memory is taken a little before it is used."""
        shape = (num_blocks, spec.num_kv_heads, _head_bytes(spec))
        pages = Arena(Arena.bytes_for(shape, torch.uint8)).empty(shape, torch.uint8)
        self._ahead.add(pages)
        kernels = self._native.int8 if spec.kv_dtype == INT8 else self._native.plain
        return _Cache(pages, spec.block_size, kernels)

    def prepare(self, group: KVCacheGroup, batch: AttentionBatch, into: Any = None) -> _Step:
        """Copy what the step's layers need from the batch."""
        step: _Step = _Step() if into is None else into
        step.set(batch)
        self._ahead.reach(int(batch.block_table.numpy().max()))
        return step

    def write(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: Any, md: Any) -> None:
        """Store k, v [N, K, D] at the step's slots."""
        cache.kernels.write[k.dtype](
            cache.pages.data_ptr(),
            ctypes.addressof(md.fields),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            layer.num_kv_heads,
            layer.head_dim,
            cache.block_size,
        )

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        cache: Any,
        md: Any,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend with q [N, H, D]; fill out [N, H, D] and, if given, lse [N, H] (sinks included)."""
        cache.kernels.attention[q.dtype](
            cache.pages.data_ptr(),
            ctypes.addressof(md.fields),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            pointer(lse),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            cache.block_size,
            layer.window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
            pointer(layer.sinks),
            int(layer.causal),
        )


def _head_bytes(spec: AttentionSpec) -> int:
    """Bytes of a KV head's keys and values in one page."""
    if spec.kv_dtype == INT8:
        return 2 * spec.block_size * (spec.head_dim + torch.float32.itemsize)
    return 2 * spec.block_size * spec.head_dim * DTYPES[spec.kv_dtype].itemsize
