"""The torch reference attention, through the kit that other backends are proved with."""

from __future__ import annotations

from headrace.backends.torch_reference.attention import TorchAttention
from headrace.core.interfaces import AttentionBackend
from headrace.testing.attention import AttentionBackendSuite


class TestTorchAttention(AttentionBackendSuite):
    def make(self) -> AttentionBackend:
        return TorchAttention()
