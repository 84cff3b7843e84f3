"""The C++ sources of adapters' kernels, for engines and for `headrace kernels build`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["KERNELS", "kernel_sources"]

KERNELS = "headrace_lora"
"""The name of the shared object."""


def kernel_sources() -> list[Path]:
    """Return the sources; headers are those of the native CPU backend."""
    return [Path(__file__).parent / "csrc" / "lora.cpp"]
