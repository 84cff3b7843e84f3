"""`headrace kernels build | list`: native kernels, compiled before an engine asks for them."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.backends.cpu.build import (
    PACKAGE_KERNELS,
    PREBUILT_VARIABLE,
    KernelBuildError,
    build_kernels,
    build_package_kernels,
    kernel_headers,
    kernels_folder,
    prebuild_kernels,
    prebuilt_folders,
)
from headrace.backends.cpu.isa import ISA_VARIABLE, TIERS, Tier, choose_tier, tier_named

__all__ = ["PLUGINS", "build_command", "list_kernels"]

PLUGINS = ("headrace.plugins.lora.kernels",)
"""Modules of built-in plugins that tell of kernels of their own."""


def build_command(
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Tier to compile for, or all: {', '.join(tier.name for tier in TIERS)}. Repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help=f"Folder for {PREBUILT_VARIABLE} to name, instead of the cache folder."
        ),
    ] = None,
) -> None:
    """Compile the native kernels and print where they are; by default for this machine's best tier.

    An image for unknown machines takes every tier: --tier all --output DIR, and HEADRACE_KERNELS=DIR where it runs.
    No compiler is needed there.
    """
    for each in _tiers(tier or []):
        path = build_package_kernels(each) if output is None else _prebuilt(each, output)
        sys.stdout.write(f"{each.name}\t{path}\n")
        for module in map(importlib.import_module, PLUGINS):
            sources, name = module.kernel_sources(), module.KERNELS
            if output is None:
                path = build_kernels(sources, each, name=name, headers=kernel_headers())
            else:
                path = _prebuilt(each, output, sources, name)
            sys.stdout.write(f"{each.name}\t{path}\n")


def _tiers(names: list[str]) -> list[Tier]:
    if "all" in names:
        return list(TIERS)
    if names:
        return [tier_named(name) for name in dict.fromkeys(names)]
    best = choose_tier(os.environ)
    if best is None:
        raise KernelBuildError(f"{ISA_VARIABLE} is 'torch', which asks for no native kernels: name a --tier")
    return [best]


def _prebuilt(
    tier: Tier, folder: Path, sources: list[Path] | None = None, name: str = PACKAGE_KERNELS
) -> Path:
    try:
        return prebuild_kernels(tier, folder.absolute(), sources, name=name)
    except OSError as error:
        raise KernelBuildError(f"--output {folder} cannot be written: {error.strerror or error}") from error


def list_kernels(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List compiled kernels, prebuilt ones first: the order in which an engine looks for its own."""
    rows = [row for folder in prebuilt_folders() for row in _compiled(folder, "prebuilt")]
    rows += _compiled(kernels_folder(), "cache")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    for row in rows:
        sys.stdout.write(f"{row['where']}\t{row['tier']}\t{row['bytes'] / 1e3:.0f} kB\t{row['path']}\n")
    if not rows:
        sys.stdout.write(f"none yet, neither prebuilt nor in {kernels_folder()}\n")


def _compiled(folder: Path, where: str) -> list[dict[str, Any]]:
    return [
        {
            "where": where,
            "tier": path.parent.name.partition("-")[0],
            "name": path.stem,
            "bytes": path.stat().st_size,
            "path": str(path),
        }
        for path in sorted(folder.glob("*/*.so"))
    ]
