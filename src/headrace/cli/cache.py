"""`headrace cache list | clear`: what lies in the cache folder, and making room."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.folders import cache_folder

__all__ = ["clear", "list_cache", "tree_bytes"]


@dataclass(frozen=True)
class _Part:
    """One folder of the cache; `entry` matches what is listed and cleared as one."""

    name: str
    entry: str
    holds: str


PARTS = (
    _Part("models", "*/*", "fetched models"),
    _Part("kernels", "*", "compiled kernels"),
)


def list_cache(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List what lies in the cache folder, with its size on disk."""
    root = cache_folder()
    rows = [row for part in PARTS for row in _rows(root, part)]
    if as_json:
        sys.stdout.write(json.dumps({"folder": str(root), "entries": rows}, indent=2) + "\n")
        return
    for row in rows:
        sys.stdout.write(f"{row['part']}\t{row['bytes'] / 1e6:.1f} MB\t{row['entry']}\n")
    for part in PARTS:
        total = sum(row["bytes"] for row in rows if row["part"] == part.name)
        sys.stdout.write(f"{part.name}: {total / 1e6:.1f} MB, {part.holds}\n")
    sys.stdout.write(f"cache folder: {root}\n")


def clear(
    kernels: Annotated[bool, typer.Option("--kernels", help="Compiled kernels.")] = False,
    models: Annotated[bool, typer.Option("--models", help="Fetched models: they are fetched again.")] = False,
) -> None:
    """Remove what is named from the cache folder; all of it can be made or fetched again.

    Engines that run keep what they have mapped; its room is free when they end.
    """
    named = {"kernels": kernels, "models": models}
    if not any(named.values()):
        raise ConfigError("nothing to clear is named: give --kernels, --models, or both")
    root = cache_folder()
    freed = 0
    for name in (name for name, wanted in named.items() if wanted):
        freed += tree_bytes(root / name)
        try:
            shutil.rmtree(root / name)
        except FileNotFoundError:
            continue  # there was nothing, or another process was quicker
        except OSError as error:
            raise HeadraceError(f"{error.filename} cannot be removed: {error.strerror or error}") from error
    sys.stdout.write(f"freed {freed / 1e6:.1f} MB in {root}\n")


def _rows(root: Path, part: _Part) -> list[dict[str, Any]]:
    folder = root / part.name
    entries = [path for path in sorted(folder.glob(part.entry)) if not path.name.startswith(".")]
    return [
        {"part": part.name, "entry": str(path.relative_to(folder)), "bytes": tree_bytes(path)}
        for path in entries
    ]


def tree_bytes(path: Path) -> int:
    """Return the bytes of all files below a path; those that go away meanwhile count nothing."""
    total = 0
    for file in (path, *path.rglob("*")):
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue
    return total
