"""A Headrace plugin: attention block by block. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace import hookimpl

if TYPE_CHECKING:
    from headrace.core.interfaces import AttentionBackend

__all__ = ["headrace_api", "headrace_register", "name"]

name = "blockwise_attention"
headrace_api = ">=1,<2"


def _backend() -> AttentionBackend:
    from headrace_blockwise_attention.backend import BlockwiseAttention

    return BlockwiseAttention()


@hookimpl
def headrace_register(registrar: Any, options: Any) -> None:
    """Register the backend `blockwise`."""
    registrar.attention_backend("blockwise", _backend)
