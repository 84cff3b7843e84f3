"""The op set `cpu`: norms, activations, rotation and sampling by native kernels, each row alone."""

from __future__ import annotations

from functools import cached_property

import torch

from headrace.backends.cpu.attention import CpuAttention
from headrace.backends.cpu.grouped import GroupedLinear
from headrace.backends.cpu.library import DTYPES, Kernels
from headrace.backends.cpu.linear import PackedLinear
from headrace.backends.cpu.native import open_kernels, require
from headrace.backends.cpu.sampling import RowSampling
from headrace.backends.cpu.tape import TapeRecorder
from headrace.backends.cpu.whole import WholeLinear
from headrace.core.interfaces.attention import AttentionBackend
from headrace.core.interfaces.graph import GraphRecorder
from headrace.core.interfaces.ops import LinearFormat, Op

__all__ = ["CpuOps"]


class CpuOps:
    """Ops on CPU tensors of bfloat16 or float32; statistics in float32, one rounding.

    A row of a result depends on that row alone, bit for bit, whatever the number of rows and threads.
    """

    name = "cpu"

    @cached_property
    def _opened(self) -> Kernels | str:
        return open_kernels()

    @cached_property
    def _ops(self) -> dict[str, Op]:
        functions = _Functions(require(self._opened))
        names = ("rms_norm", "add_rms_norm", "rotary", "add", "scale", "silu_mul", "gelu_mul", "narrow")
        found = {name: Op(name, getattr(functions, name), row_invariant=True) for name in names}
        sampling = RowSampling(require(self._opened))
        found |= {name: Op(name, getattr(sampling, name), row_invariant=True) for name in ("draw", "score")}
        return found

    @cached_property
    def _linear(self) -> dict[str, LinearFormat]:
        kernels = require(self._opened)
        return {
            "dense": PackedLinear(kernels),
            "grouped": GroupedLinear(kernels),
            "w8a8": WholeLinear(kernels),
        }

    @property
    def numerics(self) -> str:
        """Tier, and hashes of sources and compiler."""
        return require(self._opened).numerics

    def why_not(self, device: str, dtype: str) -> list[str]:
        """Reasons why it cannot serve `dtype` on `device`; empty: it can."""
        reasons = []
        if device != "cpu":
            reasons.append(f"device {device} (runs on: cpu)")
        if dtype not in DTYPES:
            reasons.append(f"dtype {dtype} (computes in: {', '.join(DTYPES)})")
        if not reasons and isinstance(self._opened, str):
            reasons.append(self._opened)
        return reasons

    def get(self, name: str) -> Op | None:
        """Return the implementation of `name`, or None."""
        return self._ops.get(name)

    def recorder(self, backend: AttentionBackend) -> GraphRecorder | None:
        """Return what records passes over these ops and `backend`; None where that is another's."""
        if not isinstance(backend, CpuAttention):
            return None
        kernels = require(self._opened)
        return TapeRecorder(kernels.replay, kernels, backend.kernels)

    def linear(self, format: str) -> LinearFormat | None:
        """Return how weights of `format` run, or None."""
        return self._linear.get(format)


class _Functions:
    """Ops with the signatures of `headrace.core.interfaces.ops`."""

    def __init__(self, kernels: Kernels) -> None:
        self._rms_norm = kernels.by_type("rms_norm")
        self._add_rms_norm = kernels.by_type("add_rms_norm")
        self._rotary = kernels.by_type("rotary")
        self._add = kernels.by_type("add")
        self._scale = kernels.by_type("scale")
        self._silu_mul = kernels.by_type("silu_mul")
        self._gelu_mul = kernels.by_type("gelu_mul")
        self._narrow = kernels.by_type("narrow")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = x.new_empty(x.shape)
        size = weight.shape[0]
        rows = x.shape[0]
        self._rms_norm[x.dtype](
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            eps,
            rows,
            x.shape[1] if x.ndim == 3 else 1,
            size,
            y.data_ptr(),
        )
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = torch.empty_like(x), torch.empty_like(x)
        size = weight.shape[0]
        self._add_rms_norm[x.dtype](
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // size,
            size,
            y.data_ptr(),
            total.data_ptr(),
        )
        return y, total

    def rotary(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turn, half = self._rotary[q.dtype], cos_sin.shape[1] // 2
        for x in (q, k):
            tokens, heads, size = x.shape
            turn(
                positions.data_ptr(),
                x.data_ptr(),
                tokens,
                heads,
                size,
                x.stride(0),
                cos_sin.data_ptr(),
                half,
            )
        return q, k

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x.new_empty(x.shape)
        rows, size = x.shape
        self._add[x.dtype](x.data_ptr(), y.data_ptr(), rows, size, total.data_ptr())
        return total

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = x.new_empty(x.shape)
        rows, size = x.shape
        self._scale[x.dtype](x.data_ptr(), factor, rows, size, y.data_ptr())
        return y

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape
        y = x.new_empty(rows, size // 2)
        self._silu_mul[x.dtype](x.data_ptr(), rows, size // 2, y.data_ptr())
        return y

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape
        y = x.new_empty(rows, size // 2)
        self._gelu_mul[x.dtype](x.data_ptr(), rows, size // 2, y.data_ptr())
        return y

    def narrow(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows, size = x.shape
        y = x.new_empty((rows, size), dtype=dtype)
        self._narrow[dtype](x.data_ptr(), rows, size, y.data_ptr())
        return y
