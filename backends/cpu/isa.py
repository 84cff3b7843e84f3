"""Instruction tiers: what each needs of the processor, how it is compiled, and which one this machine gets.

A tier is compiled for itself alone and never falls through to a lower one at run time: the same sums come out
wherever the same tier runs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, nearest

__all__ = [
    "AMX",
    "AVX2",
    "AVX512",
    "ISA_VARIABLE",
    "PORTABLE",
    "TIERS",
    "Tier",
    "choose_tier",
    "cpu_flags",
    "supported_tiers",
    "tier_named",
    "why_not",
]

ISA_VARIABLE = "HEADRACE_CPU_ISA"
TORCH = "torch"
"""The value of `HEADRACE_CPU_ISA` that asks for no native kernels at all."""

_CPUINFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "AMD64")

# From Linux's asm/prctl.h and the x86 manual: tile data is a processor state that a process must ask for.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True)
class Tier:
    """One instruction tier.

    name: as written in `HEADRACE_CPU_ISA` and in folder names.
    needs: flags of `/proc/cpuinfo` that must all be there.
    machine_flags: what the compiler is told of the machine; without any it targets the platform's baseline.
    openmp: whether kernels of the tier use OpenMP.
    """

    name: str
    needs: tuple[str, ...]
    machine_flags: tuple[str, ...]
    openmp: bool = True

    @property
    def compile_flags(self) -> tuple[str, ...]:
        """The tier's own flags: the machine's, and `HEADRACE_TIER_<NAME>` defined as 1."""
        return (*self.machine_flags, f"-DHEADRACE_TIER_{self.name.upper()}=1")


PORTABLE = Tier("portable", (), (), openmp=False)
AVX2 = Tier("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c"))
AVX512 = Tier(
    "avx512",
    (*AVX2.needs, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
    (
        *AVX2.machine_flags,
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ),
)
AMX = Tier(
    "amx",
    (*AVX512.needs, "amx_tile", "amx_bf16", "amx_int8"),
    (*AVX512.machine_flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)
TIERS = (AMX, AVX512, AVX2, PORTABLE)
"""Best first."""


def tier_named(name: str) -> Tier:
    """Return a tier by name. Raises `ConfigError` for an unknown one."""
    for tier in TIERS:
        if tier.name == name:
            return tier
    names = [tier.name for tier in TIERS]
    raise ConfigError(
        f"no instruction tier is called {name!r}{nearest(name, names)}; there are {', '.join(names)}"
    )


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the processor's flags as Linux names them; empty on other systems and other processors."""
    if platform.machine() not in _X86:
        return frozenset()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(found, "").split())


def why_not(tier: Tier, flags: frozenset[str] | None = None) -> list[str]:
    """Return why this machine cannot run a tier; empty where it can.

    flags: the processor's flags; None reads them. Asks the kernel for tile registers where only that is left, which
    holds for the whole process and cannot be undone.
    """
    flags = cpu_flags() if flags is None else flags
    missing = [flag for flag in tier.needs if flag not in flags]
    if missing:
        return [f"the processor lacks {' '.join(missing)}"]
    if tier is AMX and not _may_use_tiles():
        return ["the kernel does not permit tile registers"]
    return []


def _may_use_tiles() -> bool:
    """Ask the kernel for the tile registers' state, as a process must before its first tile instruction."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(libc.syscall(*(ctypes.c_long(value) for value in arguments))) == 0


def supported_tiers() -> tuple[Tier, ...]:
    """Return the tiers this machine can run, best first; `portable` is always among them."""
    flags = cpu_flags()
    return tuple(tier for tier in TIERS if not why_not(tier, flags))


def choose_tier(environ: Mapping[str, str] = os.environ) -> Tier | None:
    """Return the best tier this machine can run, or the one `HEADRACE_CPU_ISA` names; None where it says `torch`.

    Raises `ConfigError` for an unknown name, and for a tier that this machine cannot run.
    """
    wanted = environ.get(ISA_VARIABLE, "").strip().lower()
    if not wanted:
        return supported_tiers()[0]
    if wanted == TORCH:
        return None
    names = [*(tier.name for tier in TIERS), TORCH]
    if wanted not in names:
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}{nearest(wanted, names)}; allowed are {', '.join(names)}"
        )
    tier = tier_named(wanted)
    if reasons := why_not(tier):
        possible = [*(tier.name for tier in supported_tiers()), TORCH]
        raise ConfigError(
            f"{ISA_VARIABLE} is {wanted!r}, which this machine cannot run: {', '.join(reasons)}; "
            f"it can run {', '.join(possible)}"
        )
    return tier
