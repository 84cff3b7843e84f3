"""The table of commands, and the entry point.

`--help` is answered from the table: no command's module is imported for it, let alone torch. When a command is
called, its module alone is imported; a word that is not in the table may be a command of a plugin.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.core.plugin.registry import Registry

__all__ = ["COMMANDS", "DEFAULTS", "GROUPS", "CommandSpec", "build", "main"]


@dataclass(frozen=True)
class CommandSpec:
    """One command: its words, where it is (`module:name`), and its line in the help."""

    words: tuple[str, ...]
    target: str
    help: str


COMMANDS = (
    CommandSpec(("generate",), "headrace.cli.generate:generate", "Continue prompts."),
    CommandSpec(("chat",), "headrace.cli.chat:chat", "Talk to a model, or ask it one question."),
    CommandSpec(("serve",), "headrace.cli.serve:serve", "Serve a model over HTTP, with OpenAI's protocol."),
    CommandSpec(
        ("batch",), "headrace.cli.batch:batch", "Answer a file of requests, in OpenAI's batch format."
    ),
    CommandSpec(
        ("bench", "throughput"), "headrace.cli.bench:throughput", "Time many requests handed in together."
    ),
    CommandSpec(("bench", "latency"), "headrace.cli.bench:latency", "Time one batch, again and again."),
    CommandSpec(
        ("bench", "startup"), "headrace.cli.bench:startup", "Time fresh processes until their first token."
    ),
    CommandSpec(("bench", "serve"), "headrace.cli.bench_serve:serve", "Load a server, as its clients do."),
    CommandSpec(("pull",), "headrace.cli.models:pull", "Fetch a model into the cache folder."),
    CommandSpec(("quantize",), "headrace.cli.quantize:quantize", "Write a model with weights of fewer bits."),
    CommandSpec(("models", "list"), "headrace.cli.models:list_models", "List models and families."),
    CommandSpec(
        ("plugins", "list"), "headrace.cli.plugins:list_plugins", "List all plugins and their state."
    ),
    CommandSpec(("plugins", "show"), "headrace.cli.plugins:show_plugin", "Show what one plugin brings."),
    CommandSpec(
        ("plugins", "check"), "headrace.cli.plugins:check_plugin", "Load one plugin and try its parts."
    ),
    CommandSpec(("config", "show"), "headrace.cli.config:show", "Show every option's value and its source."),
    CommandSpec(("config", "check"), "headrace.cli.config:check", "Check a configuration without starting."),
    CommandSpec(("config", "schema"), "headrace.cli.config:schema", "Print the JSON schema of the file."),
    CommandSpec(
        ("kernels", "build"), "headrace.cli.kernels:build_command", "Compile native kernels ahead of time."
    ),
    CommandSpec(("kernels", "list"), "headrace.cli.kernels:list_kernels", "List compiled kernels."),
    CommandSpec(("cache", "list"), "headrace.cli.cache:list_cache", "List what lies in the cache folder."),
    CommandSpec(("cache", "clear"), "headrace.cli.cache:clear", "Remove kernels, weights or models from it."),
    CommandSpec(("doctor",), "headrace.cli.doctor:doctor", "Look at the machine and the installation."),
)
"""In the order of the help."""

GROUPS = {
    "models": "Look at models; without a command, list them.",
    "bench": "Measure speed on this machine.",
    "plugins": "Look at plugins.",
    "config": "Look at the configuration.",
    "kernels": "Compile native kernels.",
    "cache": "Look at the cache folder, or make room in it.",
}

DEFAULTS = {"models": "list"}
"""The command of a group that is meant where none is named."""

HELP = ("-h", "--help")

EPILOG = "Plugins may bring more commands: see headrace plugins list."


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 where something failed, 2 where it was asked for wrongly, 130 on Ctrl-C."""
    from headrace.cli.errors import clean_exit

    words = _completed(sys.argv[1:] if argv is None else argv)
    with clean_exit():
        build(words)(args=words, prog_name="headrace")


def build(argv: Sequence[str]) -> typer.Typer:
    """Put the application together for one call: the command that `argv` names is imported, others are lines of help.

    Raises what loading plugins raises, where `argv` names no command of the table.
    """
    app = _typer(help="An LLM inference engine in which every part is a plugin.", epilog=EPILOG)
    app.callback()(_version_option)
    groups = {name: _typer(help=text) for name, text in GROUPS.items()}
    called = _called(argv)
    for name, group in groups.items():
        app.add_typer(group, name=name)
        group.callback()(_nothing)
    for spec in COMMANDS:
        owner = groups[spec.words[0]] if len(spec.words) > 1 else app
        function = _import(spec.target, argv) if spec is called else _nothing
        # The called command explains itself; of the others, a line stands in the help.
        owner.command(spec.words[-1], help=None if spec is called else spec.help)(function)
    if called is None and argv and not argv[0].startswith("-") and argv[0] not in groups:
        _add_plugin_command(app, argv)
    return app


def _typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": list(HELP)},
        **settings,
    )


def _completed(argv: Sequence[str]) -> list[str]:
    """Return the words with a group's default command, where none is named; `--help` is the group's own."""
    words = list(argv)
    if words and words[0] in DEFAULTS:
        after = words[1] if len(words) > 1 else "-"
        if after.startswith("-") and after not in HELP:
            words.insert(1, DEFAULTS[words[0]])
    return words


def _called(argv: Sequence[str]) -> CommandSpec | None:
    for spec in COMMANDS:
        if tuple(argv[: len(spec.words)]) == spec.words:
            return spec
    return None


def _import(target: str, argv: Sequence[str]) -> Callable[..., None]:
    """Import a command, with engine options as flags where it takes them."""
    from headrace.cli.options import EngineCommand

    module, _, name = target.partition(":")
    command = getattr(importlib.import_module(module), name)
    function: Callable[..., None] = command.bind(argv) if isinstance(command, EngineCommand) else command
    return function


def _add_plugin_command(app: typer.Typer, argv: Sequence[str]) -> None:
    """Add the command of a plugin, if one is called so; else the parser says what there is."""
    from headrace.cli.options import EngineCommand, plugins_for

    registry: Registry = plugins_for(argv).registry
    for entry in registry.entries("cli_command"):
        if entry.name != argv[0]:
            continue
        command = entry.factory()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            function = command.bind(argv) if isinstance(command, EngineCommand) else command
            app.command(entry.name)(function)


def _nothing() -> None:
    """Stand for a command that was not called."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


def _version_option(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Nothing to do: the option's callback answers."""
