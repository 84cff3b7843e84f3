"""The native backend on every tier this machine runs, through the kit: correct, and each row alone, bit for bit."""

from __future__ import annotations

import pytest

from headrace.backends.cpu.attention import CpuAttention
from headrace.backends.cpu.isa import ISA_VARIABLE, supported_tiers
from headrace.backends.cpu.ops import CpuOps
from headrace.core.interfaces import AttentionBackend, OpSet
from headrace.testing import AttentionBackendSuite
from headrace.testing.ops import OpSetSuite


@pytest.fixture(autouse=True, params=[tier.name for tier in supported_tiers()])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)


class TestCpuAttention(AttentionBackendSuite):
    def make(self) -> AttentionBackend:
        return CpuAttention()


class TestCpuOps(OpSetSuite):
    def make(self) -> OpSet:
        return CpuOps()
