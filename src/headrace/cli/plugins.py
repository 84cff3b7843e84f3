"""`headrace plugins list | show | check`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.errors import RUNTIME
from headrace.cli.options import EngineArgs, engine_command

if TYPE_CHECKING:
    from headrace.core.plugin.manager import LoadedPlugins, PluginInfo

__all__ = ["check_plugin", "list_plugins", "show_plugin"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The plugin's name.", show_default=False)]


@engine_command(only="plugins")
def list_plugins(args: EngineArgs, as_json: Json = False) -> None:
    """List all plugins, in the order of loading: where they come from, and whether they are loaded."""
    infos = args.plugins(strict=False).infos
    if as_json:
        _write_json([_plain(info) for info in infos])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("Plugin", "State", "From", "Version", "API", "Brings")
    for info in infos:
        origin = info.distribution or info.origin
        brings = info.reason or ", ".join(part for _, part in info.registered)
        style = {"broken": "red", "disabled": "dim"}.get(info.state)
        table.add_row(info.name, info.state, origin, info.version or "", info.api, brings, style=style)
    Console(markup=False, highlight=False).print(table)


@engine_command(only="plugins")
def show_plugin(args: EngineArgs, name: Name, as_json: Json = False) -> None:
    """Show what is known about one plugin: its parts, the rooms they run in, and the options it takes."""
    loaded = args.plugins(strict=False)
    info = loaded.info(name)
    options = _options_schema(loaded, name)
    if as_json:
        _write_json({**_plain(info), "options": options})
        return
    from rich.console import Console
    from rich.table import Table

    from headrace.core.plugin.registry import KINDS

    table = Table(show_header=False)
    for label, value in (
        ("plugin", info.name),
        ("state", info.state + (f": {info.reason}" if info.reason else "")),
        ("from", f"{info.origin} {info.where}"),
        ("distribution", f"{info.distribution} {info.version}" if info.distribution else "headrace"),
        ("API", info.api),
        ("rooms", ", ".join(info.rooms)),
        *((KINDS[kind].words, part) for kind, part in info.registered),
        *((f"option {key}", _option_line(value)) for key, value in options.items()),
    ):
        table.add_row(label, value)
    Console(markup=False, highlight=False).print(table)


@engine_command(only="plugins")
def check_plugin(args: EngineArgs, name: Name) -> None:
    """Load one plugin and try what can be tried: name, API range, hook, options, and parts that need no engine."""
    from headrace.cli.plugin_check import check_parts

    loaded = args.plugins(enable=[name])
    info = loaded.info(name)
    typer.echo(f"ok: plugin {name} loads ({info.origin} {info.where}, API {info.api})")
    failed = False
    for line, good in check_parts(loaded, info):
        typer.echo(f"{'ok' if good else 'FAILED'}: {line}")
        failed = failed or not good
    if failed:
        raise typer.Exit(RUNTIME)


def _plain(info: PluginInfo) -> dict[str, Any]:
    return dataclasses.asdict(info)


def _options_schema(loaded: LoadedPlugins, name: str) -> dict[str, Any]:
    """Return the JSON schema of each option the plugin takes, by name."""
    model = getattr(loaded.manager.get_plugin(name), "Options", None)
    return dict(model.model_json_schema().get("properties", {})) if model is not None else {}


def _option_line(schema: dict[str, Any]) -> str:
    default = f", default {json.dumps(schema['default'])}" if "default" in schema else ""
    return f"{schema.get('type', 'any')}{default} {schema.get('description', '')}".strip()


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
