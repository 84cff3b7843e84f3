"""Engine options as flags, made from the union of core's sections and the plugins'.

    @engine_command
    def generate(args: EngineArgs, prompt: Annotated[list[str], typer.Option("-p", "--prompt")]) -> None:
        started = args.start()

The command gets a model argument, `-c/--config`, and a flag for every option; `args` holds those the user gave.
Flags of core's options are static; plugins are looked for when a flag is none of those, so that the usual call
loads them once, in `args.start()`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.errors import clean_exit
from headrace.cli.flags import flag_names, is_bool, is_list, metavar, section_value, value_of, values_of
from headrace.core.config import EngineConfig, OptionSpec, option_table

if TYPE_CHECKING:
    from pydantic import BaseModel

    from headrace.configuration import Started
    from headrace.core.plugin.manager import LoadedPlugins

__all__ = ["EngineArgs", "EngineCommand", "engine_command", "plugins_for"]

Parameters = dict[str, inspect.Parameter]

_SERVER = frozenset({"server"})
"""Sections that mean nothing to a command that does not serve."""


@dataclass(frozen=True)
class EngineArgs:
    """What the user gave to a command about the engine."""

    model: str | None = None
    file: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    """By flat name, alias or section; only those given."""

    def start(self, *, plugin_objects: Sequence[Any] = (), require_model: bool = True) -> Started:
        """Load plugins and validate everything, see `start_configuration`."""
        from headrace.configuration import start_configuration

        return start_configuration(
            self.model,
            file=self.file,
            flags=self.flags,
            plugin_objects=plugin_objects,
            require_model=require_model,
        )

    def plugins(self, *, strict: bool = True, enable: Sequence[str] = ()) -> LoadedPlugins:
        """Load plugins alone. strict: as in `load_plugins`; enable: plugins asked for besides."""
        from headrace.configuration.loading import load_for
        from headrace.configuration.yaml_file import read_file

        file = None if self.file is None else read_file(self.file)
        flags = dict(self.flags)
        if enable:
            flags["enable_plugins"] = [*flags.get("enable_plugins", []), *enable]
        return load_for(file, keywords={}, flags=flags, strict=strict)


@dataclass(frozen=True)
class EngineCommand:
    """A command whose first parameter is an `EngineArgs`."""

    function: Callable[..., None]
    only: str | None = None
    """The one section whose options it takes; None: all, and a model."""
    serves: bool = False
    """Whether the help shows the server's options; every command takes them, as they may stand in a common file."""

    def bind(self, argv: Sequence[str]) -> Callable[..., None]:
        """Return the function that typer sees: its own parameters, then the engine's as flags.

        argv: the call's words, in which flags of plugins are looked for.
        """
        own = _own_parameters(self.function)
        sections: Mapping[str, type[BaseModel]] = {}
        if self.only is None:
            sections = _plugin_sections(argv, _spellings(own))
        table = {
            flat: spec
            for flat, spec in option_table(sections).items()
            if self.only is None or spec.section == self.only
        }
        engine, readers = _engine_parameters(table, self.only, frozenset() if self.serves else _SERVER)
        # A command's own flag wins over an option of the same name, which its section's flag still sets.
        parameters = {**engine, **own}

        def run(**values: Any) -> None:
            with clean_exit():
                flags = {
                    name: read(values[name])
                    for name, read in readers.items()
                    if name not in own and values.get(name) not in (None, [], ())
                }
                model, file = values.get("engine_model"), values.get("engine_config")
                self.function(EngineArgs(model, file, flags), **{name: values[name] for name in own})

        ordered = sorted(parameters.values(), key=lambda p: p.name != "engine_model")
        run.__doc__ = self.function.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        return run


@typing.overload
def engine_command(function: Callable[..., None]) -> EngineCommand: ...
@typing.overload
def engine_command(
    *, only: str | None = None, serves: bool = False
) -> Callable[[Callable[..., None]], EngineCommand]: ...
def engine_command(
    function: Callable[..., None] | None = None, *, only: str | None = None, serves: bool = False
) -> EngineCommand | Callable[[Callable[..., None]], EngineCommand]:
    """Mark a command that takes engine options; see the module's text. only, serves: see `EngineCommand`."""
    if function is None:
        return lambda function: EngineCommand(function, only, serves)
    return EngineCommand(function, only, serves)


def plugins_for(argv: Sequence[str]) -> LoadedPlugins:
    """Load the plugins that a command line asks for, before it can be parsed.

    A plugin that cannot load is left out here; the command's own start says so. Raises `ConfigError`.
    """
    from headrace.configuration.loading import load_for
    from headrace.configuration.yaml_file import read_file

    table = {flat: spec for flat, spec in option_table({}).items() if spec.section == "plugins"}
    flags: dict[str, Any] = {}
    for flat, spec in table.items():
        texts = _scan(argv, flag_names(flat))
        if texts:
            flags[flat] = values_of(spec, texts) if is_list(spec) else value_of(spec, texts[-1])
    if section := _scan(argv, "--plugins"):
        flags["plugins"] = section_value("plugins", section[-1])
    files = _scan(argv, "--config") or _scan(argv, "-c")
    file = read_file(files[-1]) if files else None
    return load_for(file, keywords={}, flags=flags, strict=False)


def _plugin_sections(argv: Sequence[str], own: set[str]) -> Mapping[str, type[BaseModel]]:
    """Sections of plugins, if this call needs them to be parsed."""
    if {"-h", "--help"} & set(argv):
        # Built-in ones alone, and those that load: help is quick and answers where plugins are broken, too.
        from headrace.builtin import BUILTIN, ESSENTIAL
        from headrace.core.plugin.manager import load_plugins

        return load_plugins(BUILTIN, ESSENTIAL, discover=False, strict=False).registry.sections()
    known = own | {"--config"} | {flag_names(name) for name in EngineConfig.base_sections()}
    for spec in option_table({}).values():
        for name in spec.names:
            known |= set(flag_names(name, boolean=is_bool(spec)).split("/"))
    words = argv[: argv.index("--")] if "--" in argv else argv
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return plugins_for(argv).registry.sections() if given - known else {}


def _scan(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag in words that are not parsed yet."""
    values = []
    for index, word in enumerate(argv):
        if word == "--":
            break
        if word == flag and index + 1 < len(argv):
            values.append(argv[index + 1])
        elif word.startswith(flag + "=") and flag.startswith("--"):
            values.append(word[len(flag) + 1 :])
    return values


def _own_parameters(function: Callable[..., None]) -> Parameters:
    """Return the function's parameters behind the first, as keywords with their types resolved."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    return {
        p.name: p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(p.name, str)) for p in own
    }


def _spellings(own: Parameters) -> set[str]:
    """Return the flags that a command's own parameters have."""
    found = {"--" + name.replace("_", "-") for name in own}
    for parameter in own.values():
        for item in typing.get_args(parameter.annotation)[1:]:
            words = (getattr(item, "default", None), *(getattr(item, "param_decls", None) or ()))
            found |= {part for word in words if isinstance(word, str) for part in word.split("/")}
    return found


def _engine_parameters(
    table: Mapping[str, OptionSpec], only: str | None, hides: frozenset[str]
) -> tuple[Parameters, dict[str, Callable[[Any], Any]]]:
    """Return typer's parameters, and what turns each flag's text into a value."""
    parameters: Parameters = {}
    readers: dict[str, Callable[[Any], Any]] = {}

    def add(name: str, kind: Any, info: Any) -> None:
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
        )

    if only is None:
        help = "Alias, path, or source:reference; may stand in the configuration file instead."
        add("engine_model", str | None, typer.Argument(metavar="MODEL", help=help, show_default=False))
    add("engine_config", Path | None, typer.Option("-c", "--config", metavar="FILE", help="YAML file."))
    for flat, spec in table.items():
        for name in spec.names:
            kind, readers[name] = _reader(spec)
            boolean = kind == (bool | None)
            spellings = [flag_names(name, boolean=boolean)]
            if len(name) == 2:
                spellings.append(f"--{name}")
            add(
                name,
                kind,
                typer.Option(
                    *spellings,
                    help=_help(spec),
                    metavar=None if boolean else metavar(spec),
                    hidden=name != flat or name == "model" or spec.section in hides,
                    rich_help_panel=f"Engine: {spec.section or 'general'}",
                    show_default=False,
                ),
            )
    names = {name: spec.section for spec in table.values() for name in spec.section_names}
    for name, section in sorted(names.items()):
        text = f"Options of the section {section}, as one JSON object."
        hidden = name != section or section in EngineConfig.base_sections() or section in hides
        panel = f"Engine: {section}"
        info = typer.Option(flag_names(name), metavar="JSON", help=text, hidden=hidden, rich_help_panel=panel)
        add(name, str | None, info)
        readers[name] = _section_reader(name)
    return parameters, readers


def _reader(spec: OptionSpec) -> tuple[Any, Callable[[Any], Any]]:
    """Return the type that typer sees and what turns its value into the option's."""
    if is_bool(spec):
        return bool | None, lambda value: value
    if is_list(spec):
        return list[str] | None, lambda texts: values_of(spec, texts)
    return str | None, lambda text: value_of(spec, text)


def _section_reader(section: str) -> Callable[[Any], Any]:
    return lambda text: section_value(section, text)


def _help(spec: OptionSpec) -> str:
    text = (spec.info.description or "").replace("[", "\\[")
    default = None if spec.info.is_required() else spec.info.get_default(call_default_factory=False)
    if default in (None, [], {}, ""):
        return text
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{text} (default: {shown})"
