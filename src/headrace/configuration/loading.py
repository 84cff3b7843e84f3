"""Two steps: the file's plugins section says which plugins load, and their sections complete the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.builtin import BUILTIN, ESSENTIAL
from headrace.configuration.checks import check_device, check_parallel, check_selected, fit_sequences
from headrace.configuration.given import Given, Source, given_by_call, given_by_file
from headrace.configuration.inline import inline_parts
from headrace.configuration.values import make_section
from headrace.configuration.yaml_file import ConfigFile, read_file
from headrace.core.config import EngineConfig, OptionSpec, PluginsSection, option_table
from headrace.core.errors import ConfigError
from headrace.core.plugin.manager import LoadedPlugins, load_plugins
from headrace.core.plugin.registry import Registry

__all__ = ["Provenance", "Started", "load_config", "load_for", "start_configuration"]


@dataclass
class Provenance:
    """Where every value of a configuration comes from, and what the user should be told."""

    sources: dict[str, Source]
    """By flat name, all options."""
    values: dict[str, Any]
    """By flat name, the effective values."""
    notes: list[str] = field(default_factory=list)
    """One line each."""


@dataclass(frozen=True)
class Started:
    """What an engine starts from."""

    config: EngineConfig
    provenance: Provenance
    plugins: LoadedPlugins

    @property
    def notes(self) -> list[str]:
        """Lines for the start-up report."""
        broken = [info for info in self.plugins.infos if info.state == "broken"]
        return [*self.provenance.notes, *(f"plugin {i.name!r} is set aside: {i.reason}" for i in broken)]


def start_configuration(
    model: str | None = None,
    *,
    file: str | Path | None = None,
    keywords: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    plugin_objects: Sequence[Any] = (),
    builtin: Sequence[str] = BUILTIN,
    essential: frozenset[str] = ESSENTIAL,
    discover: bool = True,
    require_model: bool = True,
) -> Started:
    """Read the file, load the plugins it and the call ask for, and validate everything.

    keywords: by flat name or section; None means not given. A part's option may hold the part itself
    (`attention_backend=MyBackend`), and `plugins` a list of plugin objects.
    flags: the same from a command line, without parts.
    builtin, essential, discover: as in `load_plugins`.
    require_model: False allows a configuration without a model, whose `model` is empty then.

    Raises `ConfigError` and `PluginLoadError`.
    """
    words, objects = inline_parts(dict(keywords or {}))
    content = None if file is None else read_file(file)
    plugins = load_for(
        content,
        keywords=words,
        flags=flags or {},
        objects=[*plugin_objects, *objects],
        builtin=builtin,
        essential=essential,
        discover=discover,
    )
    config, provenance = load_config(
        model,
        file=content,
        keywords=words,
        flags=flags,
        registry=plugins.registry,
        require_model=require_model,
    )
    return Started(config, provenance, plugins)


def load_for(
    file: ConfigFile | None,
    *,
    keywords: Mapping[str, Any],
    flags: Mapping[str, Any],
    objects: Sequence[Any] = (),
    builtin: Sequence[str] = BUILTIN,
    essential: frozenset[str] = ESSENTIAL,
    discover: bool = True,
    strict: bool = True,
) -> LoadedPlugins:
    """Load the plugins that file, keywords and flags ask for: only the plugins section is looked at.

    Raises `ConfigError` and `PluginLoadError`.
    """
    table = {flat: spec for flat, spec in option_table({}).items() if spec.section == "plugins"}
    names = {"plugins"} | {name for spec in table.values() for name in spec.names}

    def of_plugins(data: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key.replace("-", "_") in names}

    part = None if file is None else ConfigFile(file.path, of_plugins(file.data), file.lines)
    given = _merge(part, of_plugins(keywords), of_plugins(flags), table)[0]
    section = make_section(PluginsSection, "plugins", table, given)
    return load_plugins(
        builtin,
        essential,
        objects=objects,
        files=section.files,
        enable=section.enable,
        disable=section.disable,
        options=section.options,
        discover=discover,
        strict=strict,
    )


def load_config(
    model: str | None = None,
    *,
    file: str | Path | ConfigFile | None = None,
    keywords: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    registry: Registry,
    device: str = "cpu",
    require_model: bool = True,
) -> tuple[EngineConfig, Provenance]:
    """Validate file, keywords and flags by the union of core's sections and those in `registry`.

    Raises `ConfigError` naming the option, the value, where it was given and what is allowed.
    """
    sections = registry.sections()
    table = option_table(sections)
    content = file if isinstance(file, ConfigFile) or file is None else read_file(file)
    given, notes = _merge(content, keywords or {}, flags or {}, table, model=model)
    if "model" not in given and not require_model:
        given["model"] = Given("", Source("default", "(not set)"), "model")
    _check_model(given, require_model)
    top = _top_level(table, given)
    parts = {
        name: make_section(section, name, table, given)
        for name, section in EngineConfig.base_sections().items()
    }
    extra = {name: make_section(section, name, table, given) for name, section in sections.items()}
    config = top.model_copy(update={**parts, "sections": extra})
    check_selected({flat: _value(config, table[flat]) for flat in given}, registry)
    check_device(config, device)
    check_parallel(config, registry)
    config, note = fit_sequences(config, given)
    sources = {flat: given[flat].source if flat in given else Source("default") for flat in table}
    if note is not None:
        notes.append(note)
        sources["max_num_seqs"] = Source("adjusted", "to max_num_batched_tokens")
    values = {flat: _value(config, spec) for flat, spec in table.items()}
    return config, Provenance(sources, values, notes)


def _merge(
    file: ConfigFile | None,
    keywords: Mapping[str, Any],
    flags: Mapping[str, Any],
    table: Mapping[str, OptionSpec],
    *,
    model: str | None = None,
) -> tuple[dict[str, Given], list[str]]:
    """Lay the sources over each other: file, then flags and keywords, which stand side by side."""
    from_file = {} if file is None else given_by_file(file, table)
    from_call = given_by_call(keywords, table, "keyword")
    argument = {} if model is None else {"model": Given(str(model), Source("argument"), "model")}
    for layer in (given_by_call(flags, table, "flag"), argument):
        for flat, item in layer.items():
            known = from_call.get(flat)
            if known is not None and known.value != item.value:
                raise ConfigError(
                    f"{flat} is given twice: {known.value!r} ({known.source}) and {item.value!r} ({item.source}); "
                    "keep one",
                    option=flat,
                )
            from_call[flat] = item
    notes = []
    old, new = from_file.get("model"), from_call.get("model")
    if old is not None and new is not None and old.value != new.value:
        notes.append(f"model {new.value!r} ({new.source}) replaces {old.value!r} ({old.source})")
    return {**from_file, **from_call}, notes


def _check_model(given: Mapping[str, Given], require: bool) -> None:
    item = given.get("model")
    if item is None:
        raise ConfigError(
            "no model: name one (an alias, a path, or source:reference) as the first argument, or as `model` in the "
            "configuration file",
            option="model",
        )
    if require and isinstance(item.value, str) and not item.value.strip():
        raise ConfigError(
            f"model must be an alias, a path, or source:reference, got {item.value!r} ({item.source})",
            option="model",
        )


def _top_level(table: Mapping[str, OptionSpec], given: Mapping[str, Given]) -> EngineConfig:
    return make_section(EngineConfig, "", table, given)


def _value(config: EngineConfig, spec: OptionSpec) -> Any:
    """An option's effective value."""
    if not spec.section:
        return getattr(config, spec.field)
    base = EngineConfig.base_sections()
    owner = getattr(config, spec.section) if spec.section in base else config.sections[spec.section]
    return getattr(owner, spec.field)
