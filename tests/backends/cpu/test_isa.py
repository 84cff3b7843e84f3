"""Which instruction tier a machine gets, and what asking for another one says."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from headrace.backends.cpu import isa
from headrace.backends.cpu.isa import (
    AMX,
    AVX2,
    AVX512,
    PORTABLE,
    TIERS,
    choose_tier,
    supported_tiers,
    why_not,
)
from headrace.core.errors import ConfigError

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
flags\t\t: fpu sse2 {flags}
bugs\t\t: avx512f
processor\t: 1
flags\t\t: fpu sse2 {flags}
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretend to be an x86 processor with the given flags; `tiles`: what the kernel says about tile registers."""

    def pretend(*flags: str, tiles: bool = True, name: str = "x86_64") -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(CPUINFO.format(flags=" ".join(flags)))
        read = isa.cpu_flags
        monkeypatch.setattr(isa.platform, "machine", lambda: name)
        monkeypatch.setattr(isa, "cpu_flags", lambda: read(file))
        monkeypatch.setattr(isa, "_may_use_tiles", lambda: tiles)

    return pretend


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (AMX.needs, AMX),
        (AVX512.needs, AVX512),
        (AVX2.needs, AVX2),
        (("avx2",), PORTABLE),
        ((), PORTABLE),
        ([flag for flag in AMX.needs if flag != "amx_bf16"], AVX512),
        ([flag for flag in AMX.needs if flag != "avx512_bf16"], AVX2),
    ],
)
def test_the_best_tier_whose_flags_are_all_there(machine, flags, best):
    machine(*flags)
    assert choose_tier({}) is best
    assert choose_tier({"HEADRACE_CPU_ISA": " "}) is best
    assert supported_tiers() == TIERS[TIERS.index(best) :]


def test_tiles_need_the_kernels_permission(machine):
    machine(*AMX.needs, tiles=False)
    assert choose_tier({}) is AVX512
    assert why_not(AMX) == ["the kernel does not permit tile registers"]


@pytest.mark.parametrize("name", ["aarch64", "arm64", "riscv64"])
def test_other_processors_are_portable_whatever_their_flags(machine, name):
    machine(*AMX.needs, name=name)
    assert supported_tiers() == (PORTABLE,)


def test_a_system_without_cpuinfo_is_portable(tmp_path):
    assert isa.cpu_flags(tmp_path / "none") == frozenset()


def test_a_lower_tier_may_be_asked_for_and_torch(machine):
    machine(*AVX512.needs)
    assert [choose_tier({"HEADRACE_CPU_ISA": n}) for n in ("avx512", "AVX2", "portable", "torch")] == [
        AVX512,
        AVX2,
        PORTABLE,
        None,
    ]


def test_a_tier_that_cannot_run_is_refused_with_what_is_missing(machine):
    """Source: vllm-project/vllm#4542, #14701, #19494: an illegal instruction instead of a message."""
    machine(*AVX2.needs)
    with pytest.raises(ConfigError) as error:
        choose_tier({"HEADRACE_CPU_ISA": "avx512"})
    text = str(error.value)
    assert "HEADRACE_CPU_ISA is 'avx512', which this machine cannot run" in text
    assert "the processor lacks avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni;" in text
    assert text.endswith("it can run avx2, portable, torch")


def test_an_unknown_name_is_refused_with_the_nearest(machine):
    machine()
    with pytest.raises(
        ConfigError, match=r"did you mean 'avx512'.*allowed are amx, avx512, avx2, portable, torch"
    ):
        choose_tier({"HEADRACE_CPU_ISA": "avx-512"})
    with pytest.raises(ConfigError, match="no instruction tier is called 'sse'"):
        isa.tier_named("sse")


def test_flags_grow_with_the_tier():
    for higher, lower in itertools.pairwise(TIERS):
        assert set(lower.needs) < set(higher.needs)
        assert set(lower.machine_flags) < set(higher.machine_flags)
    assert PORTABLE.compile_flags == ("-DHEADRACE_TIER_PORTABLE=1",)
    assert not [flag for tier in TIERS for flag in tier.compile_flags if "fast" in flag or "native" in flag]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's answer is Linux's")
def test_this_machine_answers():
    tiers = supported_tiers()
    assert tiers[-1] is PORTABLE
    assert ("amx_tile" in isa.cpu_flags()) or AMX not in tiers
