"""`headrace config show | check | schema`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from headrace.cli.options import EngineArgs, engine_command
from headrace.core.config import option_table

__all__ = ["check", "schema", "show"]

HIDDEN = "(hidden)"
"""In the place of a secret."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@engine_command
def show(args: EngineArgs, as_json: Json = False) -> None:
    """Show every option's value, and where it comes from."""
    started = args.start(require_model=False)
    provenance = started.provenance
    specs = option_table(started.plugins.registry.sections())
    values = {
        flat: HIDDEN if specs[flat].secret and value else value for flat, value in provenance.values.items()
    }
    if as_json:
        options = {
            flat: {"value": values[flat], "source": str(source)}
            for flat, source in provenance.sources.items()
        }
        sys.stdout.write(json.dumps({"options": options, "notes": started.notes}, indent=2) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("Option", "Value", "Source")
    for flat, source in provenance.sources.items():
        style = "dim" if source.kind == "default" else None
        table.add_row(flat, _shown(values[flat]), str(source), style=style)
    console = Console(markup=False, highlight=False)
    console.print(table)
    for note in started.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _shown(value: Any) -> str:
    """Return a value as it would stand in the file."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


@engine_command
def check(args: EngineArgs) -> None:
    """Check a configuration: load its plugins and validate every option; start nothing."""
    started = args.start()
    for note in started.notes:
        typer.echo(f"note: {note}")
    given = sum(source.kind != "default" for source in started.provenance.sources.values())
    loaded = sum(info.state == "loaded" for info in started.plugins.infos)
    typer.echo(f"ok: model {started.config.model}, {given} options given, {loaded} plugins loaded")


@engine_command(only="plugins")
def schema(args: EngineArgs) -> None:
    """Print the JSON schema of the configuration file, sections of plugins included."""
    from headrace.configuration import json_schema

    document = json_schema(args.plugins().registry.sections())
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
