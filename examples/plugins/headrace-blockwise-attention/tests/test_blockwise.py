"""The backend, proved with Headrace's conformance kit."""

from __future__ import annotations

from headrace_blockwise_attention.backend import BlockwiseAttention

from headrace.testing import AttentionBackendSuite


class TestBlockwise(AttentionBackendSuite):
    """Every test of the contract."""

    def make(self) -> BlockwiseAttention:
        """Return the backend under test."""
        return BlockwiseAttention()
