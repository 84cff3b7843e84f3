"""Registers the torch reference: attention backend `torch`, op set `torch`. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces.attention import AttentionBackend
    from headrace.core.interfaces.ops import OpSet
    from headrace.core.plugin.registry import Registrar

__all__ = ["headrace_api", "headrace_register", "name"]

name = "torch_reference"
headrace_api = ">=1,<2"


def _attention() -> AttentionBackend:
    from headrace.backends.torch_reference.attention import TorchAttention

    return TorchAttention()


def _ops() -> OpSet:
    from headrace.backends.torch_reference.ops import TorchOps

    return TorchOps()


@hookimpl
def headrace_register(registrar: Registrar, options: Any) -> None:
    """Register both parts; torch is imported when an engine needs one."""
    registrar.attention_backend("torch", _attention)
    registrar.op_set("torch", _ops)
