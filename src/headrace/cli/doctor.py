"""`headrace doctor`: the machine, the installation and the plugins, and what to mend."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from headrace.cli.cache import tree_bytes
from headrace.cli.doctor_machine import machine_facts, native_facts
from headrace.cli.options import EngineArgs, engine_command
from headrace.core.folders import cache_folder

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
        "machine": machine_facts(advice),
        "native": native_facts(advice),
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


def _cache(advice: list[str]) -> dict[str, Any]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    if not writable:
        advice.append(f"the cache folder {folder} cannot be written: set HEADRACE_CACHE to one that can")
    return {
        "folder": str(folder),
        "writable": writable,
        "size_bytes": tree_bytes(folder),
        "free_bytes": shutil.disk_usage(existing).free,
    }


def _plugins(args: EngineArgs, advice: list[str]) -> dict[str, str]:
    states = {}
    for info in args.plugins(strict=False).infos:
        package = f" ({info.distribution} {info.version})" if info.distribution else ""
        states[info.name] = info.state + package + (f": {info.reason}" if info.reason else "")
        if info.state == "broken":
            advice.append(f"plugin {info.name!r}{package} is broken: {info.reason}")
    return states
