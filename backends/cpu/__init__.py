"""The native CPU backend: C++ kernels, compiled on the machine they run on, called through a plain C ABI."""

from __future__ import annotations

from headrace.backends.cpu.build import build_kernels

__all__ = ["build_kernels"]
