"""C++ kernels become a shared object, once for each text, compiler and tier, and are loaded beside torch.

sources, headers, tier ──► prebuilt folder?  ──► its shared object, no compiler needed
                       └─► compiler ─► cache folder/kernels/KEY/name.so, compiled by the first who asks
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.backends.cpu.compiler import Compiler, KernelBuildError, compile_shared, find_compiler
from headrace.backends.cpu.isa import ISA_VARIABLE, Tier, choose_tier
from headrace.backends.cpu.once import create_once
from headrace.core.folders import cache_folder

__all__ = [
    "PACKAGE_KERNELS",
    "PREBUILT_VARIABLE",
    "KernelBuildError",
    "build_kernels",
    "build_package_kernels",
    "kernel_headers",
    "kernel_sources",
    "kernels_folder",
    "load_kernels",
    "prebuild_kernels",
    "prebuilt_folders",
    "sources_digest",
]

logger = logging.getLogger("headrace")

PREBUILT_VARIABLE = "HEADRACE_KERNELS"
PACKAGE_KERNELS = "headrace_cpu"
"""The name of the package's own shared object."""

_HERE = Path(__file__).parent


def kernel_sources() -> list[Path]:
    """Return the package's own C++ sources, in the order they are linked."""
    return sorted((_HERE / "csrc").glob("*.cpp"))


def kernel_headers() -> list[Path]:
    """Return the headers of the package's own C++ sources."""
    return sorted((_HERE / "csrc").glob("*.h"))


def kernels_folder() -> Path:
    """Return where compiled kernels are kept: `kernels` below the cache folder."""
    return cache_folder() / "kernels"


def prebuilt_folders() -> list[Path]:
    """Return where kernels are looked for before anything is compiled: `$HEADRACE_KERNELS`, then the package."""
    named = os.environ.get(PREBUILT_VARIABLE)
    return [*([Path(named).expanduser()] if named else []), _HERE / "prebuilt"]


def build_kernels(
    sources: Sequence[Path], tier: Tier | None = None, *, name: str = "kernels", headers: Sequence[Path] = ()
) -> Path:
    """Return the path of a shared object with these sources compiled for a tier; compiled now if nowhere to be found.

    sources: C++17 files with a plain C ABI (`extern "C"`); a tier's own code stands under `#if HEADRACE_TIER_AVX2`
        and the like, and OpenMP may be used.
    tier: None takes the machine's best, or what `HEADRACE_CPU_ISA` says.
    name: of the file; letters, digits, `_` and `-`.
    headers: files of yours that the sources include; their folders are searched, and a change compiles again.
    Safe where several processes ask at once. Where the cache folder cannot be written, a temporary folder of the
    user is used, with a warning.
    Raises `KernelBuildError` where there is no compiler or it fails, `ConfigError` for a wrong `HEADRACE_CPU_ISA`.
    """
    tier = _chosen(tier)
    digest = sources_digest(sources, headers, tier)
    for folder in prebuilt_folders():
        path = folder / digest / f"{name}.so"
        if path.is_file():
            return path
    compiler = _needed_compiler()
    key = f"{digest}-{_digest([*compiler.command, compiler.version, *compiler.flags(tier)])}"

    def compiled_in(root: Path) -> Path:
        target = root / key / f"{name}.so"
        return create_once(target, lambda to: _compiled(compiler, tier, sources, headers, to, name))

    try:
        return compiled_in(kernels_folder())
    except OSError as error:
        root = _temporary_folder()
        logger.warning(
            "the cache folder %s cannot be used for kernels (%s): they go to %s; set HEADRACE_CACHE to a folder "
            "that can be written",
            cache_folder(),
            error.strerror or error,
            root,
        )
    return compiled_in(root)


def build_package_kernels(tier: Tier | None = None) -> Path:
    """Return the shared object of the package's own kernels. Raises as `build_kernels` does."""
    return build_kernels(kernel_sources(), tier, name=PACKAGE_KERNELS, headers=kernel_headers())


def prebuild_kernels(
    tier: Tier, folder: Path, sources: Sequence[Path] | None = None, *, name: str = PACKAGE_KERNELS
) -> Path:
    """Compile kernels into a folder for `HEADRACE_KERNELS` to name; return the shared object.

    sources: those of a plugin, which go with the package's headers; None: the package's own kernels.
    Raises `KernelBuildError` where there is no compiler or it fails, `OSError` for an unwritable folder.
    """
    given, headers = kernel_sources() if sources is None else sources, kernel_headers()
    compiler = _needed_compiler()
    target = folder / sources_digest(given, headers, tier) / f"{name}.so"
    return create_once(target, lambda to: _compiled(compiler, tier, given, headers, to, name))


def _compiled(
    compiler: Compiler, tier: Tier, sources: Sequence[Path], headers: Sequence[Path], folder: Path, name: str
) -> Path:
    """Say so, since it takes seconds in which nothing else is seen, and compile."""
    what = "native kernels" if name == PACKAGE_KERNELS else f"kernels {name!r}"
    logger.warning("compiling %s for %s (once, some seconds)", what, tier.name)
    return compile_shared(compiler, tier, sources, headers, folder, name)


def load_kernels(path: Path) -> ctypes.CDLL:
    """Load a shared object that `build_kernels` made, beside torch, whose OpenMP runtime it computes with.

    Raises `KernelBuildError` where it cannot be loaded.
    """
    importlib.import_module("torch")  # brings the OpenMP runtime that the kernels were linked without
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(f"kernels cannot be loaded: {error}; {_advice(str(error))}") from error


def _advice(text: str) -> str:
    without = f"{ISA_VARIABLE}=portable computes without OpenMP, {ISA_VARIABLE}=torch without native kernels"
    if any(symbol in text for symbol in ("GOMP_", "omp_", "__kmpc_")):
        return f"the OpenMP runtime they need is not the one this build of torch has loaded: {without}"
    if "failed to map segment" in text or "not permitted" in text:
        return (
            "its file system may forbid running code (noexec): set HEADRACE_CACHE to a folder that allows it"
        )
    return f"headrace cache clear --kernels compiles again; {without}"


def _chosen(tier: Tier | None) -> Tier:
    chosen = tier or choose_tier()
    if chosen is None:
        raise KernelBuildError(
            f"{ISA_VARIABLE} is 'torch', which asks for no native kernels; unset it for some"
        )
    return chosen


def _needed_compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildError(
            "no C++ compiler found, which native kernels need once: install g++ (package g++ or gcc-c++) or clang, "
            f"or name one in CXX; or set {PREBUILT_VARIABLE} to a folder that `headrace kernels build --output` "
            f"filled, or {ISA_VARIABLE}=torch for no native kernels"
        )
    return compiler


def sources_digest(sources: Sequence[Path], headers: Sequence[Path], tier: Tier) -> str:
    """Return a name for what is compiled, whoever compiles it: the tier's name and a hash, as folder name.

    Raises `KernelBuildError` where there is nothing to compile, or a file cannot be read.
    """
    if not sources:
        raise KernelBuildError("there are no C++ sources to compile")
    parts: list[str | bytes] = [platform.machine(), *tier.compile_flags]
    try:
        for path in (*sources, *headers):
            parts += [path.name, path.read_bytes()]
    except OSError as error:
        raise KernelBuildError(f"a kernel source cannot be read: {error}") from error
    return f"{tier.name}-{_digest(parts)}"


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return digest.hexdigest()[:16]


def _temporary_folder() -> Path:
    """A folder of this user among the temporary files, for nobody else to put code in.

    Raises `KernelBuildError` where there is none.
    """
    try:
        folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise KernelBuildError(
            f"neither the cache folder {cache_folder()} nor a temporary one can be written ({error}): set "
            "HEADRACE_CACHE to a folder that can"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelBuildError(f"{folder} is not this user's alone: remove it, or set HEADRACE_CACHE")
    return folder / "kernels"
