"""`headrace doctor`: the machine, the installation and the plugins, and what to mend."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import EngineArgs, engine_command

__all__ = ["doctor", "examine"]

PACKAGES = (
    "headrace",
    "torch",
    "numpy",
    "pydantic",
    "pluggy",
    "msgspec",
    "tokenizers",
    "jinja2",
    "typer",
    "pyyaml",
)

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@engine_command(only="plugins")
def doctor(
    args: EngineArgs, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Look at the machine, the installation and the plugins; end with what should be mended."""
    report = examine(args)
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", show_header=False)
    for part, facts in report.items():
        if isinstance(facts, dict):
            table.add_section()
            for name, value in facts.items():
                table.add_row(f"{part} {name}", str(value))
    console = Console(markup=False, highlight=False)
    console.print(table)
    for line in report["advice"]:
        console.print(f"advice: {line}", soft_wrap=True)


def examine(args: EngineArgs) -> dict[str, Any]:
    """Return all facts by part, and `advice`, a list of lines."""
    advice: list[str] = []
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": _torch(advice),
        "machine": _machine(advice),
        "cache": _cache(advice),
        "plugins": _plugins(args, advice),
        "advice": advice,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _torch(advice: list[str]) -> dict[str, Any]:
    """What torch computes with; an installation that cannot be imported is a finding."""
    try:
        import torch
    except ImportError as error:
        advice.append(f"torch cannot be imported ({error}): install it again")
        return {"error": str(error)}
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
    }


def _machine(advice: list[str]) -> dict[str, Any]:
    from headrace.executors.process import allowed_cores, available_memory

    pages = _read(HUGE_PAGES)
    setting = pages.partition("[")[2].partition("]")[0] if pages else "unknown"
    if setting == "never":
        advice.append(
            f"transparent huge pages are off: write madvise to {HUGE_PAGES} for faster reading of weights"
        )
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        advice.append(
            "no C++ compiler found: install g++ or clang for native kernels; torch computes without them"
        )
    return {
        "cores": os.cpu_count() or 1,
        "cores_allowed": allowed_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory(),
        "huge_pages": setting,
        "compiler": compiler or "none",
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cache(advice: list[str]) -> dict[str, Any]:
    from headrace.models.sources.cache import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    if not writable:
        advice.append(f"the cache folder {folder} cannot be written: set HEADRACE_CACHE to one that can")
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {
        "folder": str(folder),
        "writable": writable,
        "size_bytes": _sum(lambda path: path.stat().st_size, files),
        "free_bytes": shutil.disk_usage(existing).free,
    }


def _sum(size: Callable[[Path], int], files: list[Path]) -> int:
    total = 0
    for path in files:
        try:
            total += size(path)
        except OSError:
            continue  # it went away meanwhile
    return total


def _plugins(args: EngineArgs, advice: list[str]) -> dict[str, str]:
    states = {}
    for info in args.plugins(strict=False).infos:
        package = f" ({info.distribution} {info.version})" if info.distribution else ""
        states[info.name] = info.state + package + (f": {info.reason}" if info.reason else "")
        if info.state == "broken":
            advice.append(f"plugin {info.name!r}{package} is broken: {info.reason}")
    return states
