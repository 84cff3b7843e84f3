"""Opens the kernels an engine is to use, or says in words why there are none."""

from __future__ import annotations

from headrace.backends.cpu.build import KernelBuildError
from headrace.backends.cpu.isa import ISA_VARIABLE, choose_tier
from headrace.backends.cpu.library import Kernels
from headrace.core.errors import ConfigError

__all__ = ["open_kernels", "require"]


def open_kernels() -> Kernels | str:
    """Return the machine's best kernels, compiled if need be, or the reason why there are none.

    Raises `ConfigError` where the variable `HEADRACE_CPU_ISA` names a tier this machine lacks.
    """
    tier = choose_tier()
    if tier is None:
        return f"{ISA_VARIABLE} is 'torch'"
    try:
        return Kernels(tier)
    except KernelBuildError as error:
        return str(error)


def require(opened: Kernels | str) -> Kernels:
    """Return what was opened. Raises `ConfigError` with the reason where it is one."""
    if isinstance(opened, str):
        raise ConfigError(f"the native CPU backend cannot run: {opened}")
    return opened
