"""The machine's C++ compiler: which one, with which flags, and what it said where it failed."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.backends.cpu.isa import ISA_VARIABLE, Tier
from headrace.core.errors import HeadraceError

__all__ = ["Compiler", "KernelBuildError", "compile_shared", "find_compiler", "loaded_symbol"]

logger = logging.getLogger("headrace")

COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
"""Never -ffast-math: sums keep their order, and products are fused only where the source says so."""

_CANDIDATES = ("g++", "clang++", "c++")
_TAIL_LINES = 20


class KernelBuildError(HeadraceError):
    """Native kernels cannot be built or loaded; the text says what to install or to set."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    command: its path, with arguments where `$CXX` has some.
    version: all that `--version` prints.
    """

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        """Whether it is clang, which makes code for another OpenMP runtime than g++."""
        return "clang" in self.version

    @property
    def title(self) -> str:
        """Its path and the first line of its version."""
        return f"{shlex.join(self.command)} ({self.version.partition(chr(10))[0]})"

    def flags(self, tier: Tier) -> tuple[str, ...]:
        """Return the flags a source is compiled with for a tier."""
        return (*COMMON_FLAGS, *tier.compile_flags, *self._openmp(tier))

    def _openmp(self, tier: Tier) -> tuple[str, ...]:
        """OpenMP, if the runtime in this process is the one whose calls the compiler makes.

        g++ calls GNU's runtime, which torch's wheels for Linux bring along. clang calls LLVM's.
        """
        if tier.openmp and not self.is_clang:
            return ("-fopenmp",)
        if tier.openmp and loaded_symbol("__kmpc_fork_call"):
            return ("-fopenmp",)
        return ("-Wno-unknown-pragmas",)


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler | None:
    """Return the compiler `$CXX` names, or g++, clang++ or c++, the first there is; None where there is none.

    Raises `KernelBuildError` where `$CXX` names one that is not there, or that does not answer.
    """
    path = environ.get("PATH", os.defpath)
    asked = shlex.split(environ.get("CXX", ""))
    found = next(
        (where for name in asked[:1] or _CANDIDATES if (where := shutil.which(name, path=path))), None
    )
    if found is None:
        if asked:
            raise KernelBuildError(
                f"CXX is {asked[0]!r}, which is not there; name a C++ compiler or unset CXX"
            )
        return None
    command = (found, *asked[1:])
    done = _run([*command, "--version"])
    if done.returncode != 0:
        raise KernelBuildError(f"the C++ compiler {shlex.join(command)} does not run: {_tail(done.stdout)}")
    return Compiler(command, done.stdout.strip())


def loaded_symbol(name: str) -> bool:
    """Return whether libraries this process has loaded for all offer a symbol, torch's OpenMP runtime among them."""
    importlib.import_module("torch")
    return hasattr(ctypes.CDLL(None), name)


def compile_shared(
    compiler: Compiler, tier: Tier, sources: Sequence[Path], headers: Sequence[Path], folder: Path, name: str
) -> Path:
    """Compile sources side by side, link them in `folder`, and return the shared object `folder/name.so`.

    OpenMP is left out of the link: its symbols resolve to the runtime torch has loaded, since two pools of threads
    in one process fight. Raises `KernelBuildError` with the end of what the compiler said.
    """
    if tier.openmp and "-fopenmp" not in compiler.flags(tier):
        logger.warning(
            "%s makes code for another OpenMP runtime than the one torch has loaded: kernels compute on one "
            "thread; install g++ for more",
            compiler.title,
        )
    includes = [f"-I{path}" for path in dict.fromkeys(header.parent for header in headers)]
    flags = [*compiler.flags(tier), *includes]
    objects = [folder / f"{index}.{source.stem}.o" for index, source in enumerate(sources)]

    def one(source: Path, target: Path) -> None:
        _checked([*compiler.command, *flags, "-c", str(source), "-o", str(target)], tier)

    with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1)) as pool:
        list(pool.map(one, sources, objects))
    shared = folder / f"{name}.so"
    _checked([*compiler.command, "-shared", *map(str, objects), "-o", str(shared)], tier)
    for path in objects:
        path.unlink()
    return shared


def _checked(command: list[str], tier: Tier) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise KernelBuildError(
            f"compiling kernels of tier {tier.name!r} failed (exit status {done.returncode}): {shlex.join(command)}\n"
            f"{_tail(done.stdout)}\n"
            f"A newer compiler may know more; {ISA_VARIABLE} chooses a lower tier, or torch for no native kernels"
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the C locale, with both outputs as one."""
    try:
        return subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, f"{command[0]}: {error.strerror or error}")


def _tail(output: str) -> str:
    lines = output.strip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
