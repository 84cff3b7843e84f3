"""`headrace pull` and `headrace models`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import EngineArgs, engine_command

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["list_models", "pull"]

Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Alias, path, or source:reference.", show_default=False),
]
Accepted = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-license",
        metavar="NAME",
        help="Accept terms of use, once; give it again, or names with commas between, for several.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Row = Mapping[str, Any]


@engine_command(only="plugins")
def pull(args: EngineArgs, name: Name, accept_license: Accepted = None) -> None:
    """Fetch a model into the cache folder, unless it is there, and print its path.

    The cache folder is HEADRACE_CACHE, by default headrace below XDG_CACHE_HOME or ~/.cache.
    """
    from headrace.models.opening import resolve_model
    from headrace.progress import download_progress

    registry = args.plugins().registry
    given = {word.strip() for text in accept_license or () for word in text.split(",")} - {""}
    with download_progress() as progress:
        path = resolve_model(name, registry, progress, accept_license=given)
    sys.stdout.write(f"{path}\n")


@engine_command(only="plugins")
def list_models(args: EngineArgs, as_json: Json = False) -> None:
    """List models by alias, those in the cache folder, and the families that run.

    Each model's name may be given to other commands; so may a path, or ORG/NAME, of a model of any of the families.
    """
    from headrace.models.catalog import describe_families, describe_models
    from headrace.models.sources.cache import cache_folder

    registry = args.plugins().registry
    models = describe_models(registry)
    if as_json:
        told = {"models": models, "families": describe_families(registry)}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(_model_table(models))
    console.print(f"cache folder: {cache_folder()}", soft_wrap=True)
    for row in models:
        if not row["accepted"]:
            name, terms = row["name"], row["terms"]
            console.print(
                f"{name} comes under terms to accept first: {terms} (headrace pull {name} says how)",
                soft_wrap=True,
            )
    # Behind what is quick: the families' own files import torch.
    console.print(_family_table(describe_families(registry)))


def _model_table(rows: Iterable[Row]) -> Table:
    cells = [
        (
            row["name"],
            f"{row['size'] / 1e6:.1f} MB",
            (row["licence"] or "") if row["accepted"] else f"{row['licence']} (to accept)",
            row["family"] or "",
            ", ".join(row["supports"] or ()),
            "yes" if row["cached"] else "no",
            # What it is fetched from; the path inside is for machines, which read JSON.
            row["source"].partition("/")[0],
        )
        for row in rows
    ]
    return _table(("Model", "Size", "Licence", "Family", "Supports", "Cached", "Source"), cells)


def _family_table(rows: Iterable[Row]) -> Table:
    cells = [
        (
            row["name"],
            "\n".join(row["architectures"]) or "other decoders",
            ", ".join(row["formats"]),
            ", ".join(row["supports"]),
        )
        for row in rows
    ]
    return _table(("Family", "Architectures", "Formats", "Supports"), cells)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table in which no name is cut short, and short ones stay in one line: they are there to be copied."""
    from rich.table import Table

    table = Table()
    for heading, *cells in zip(headings, *rows, strict=True):
        lines = [line for cell in cells for line in cell.splitlines()]
        is_name = heading in ("Model", "Family", "Architectures")
        table.add_column(heading, overflow="fold", no_wrap=is_name and max(map(len, lines), default=0) <= 24)
    for row in rows:
        table.add_row(*row)
    return table
