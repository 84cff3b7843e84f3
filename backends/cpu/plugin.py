"""Registers the native CPU backend: attention backend `cpu`, op set `cpu`. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces.attention import AttentionBackend
    from headrace.core.interfaces.ops import OpSet
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "cpu"
headrace_api = ">=1,<2"


def _attention() -> AttentionBackend:
    from headrace.backends.cpu.attention import CpuAttention

    return CpuAttention()


def _ops() -> OpSet:
    from headrace.backends.cpu.ops import CpuOps

    return CpuOps()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register both parts; torch is imported, and kernels are compiled, when an engine needs one."""
    registrar.attention_backend("cpu", _attention)
    registrar.op_set("cpu", _ops)
