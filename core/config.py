"""The engine's options: core's own sections, and the sections that plugins bring.

The flat name is the interface: keyword `max_num_seqs` = flag `--max-num-seqs` = YAML `scheduler.max_num_seqs`
(or `max_num_seqs` at the top of the file). A field's flat name is its own unless `flat` says otherwise.
Reading files, flags and keywords is the front door's work (`headrace.configuration`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

from headrace.core.errors import ConfigError
from headrace.core.logprobs import LogprobsMode

__all__ = [
    "AttentionSection",
    "CacheSection",
    "EngineConfig",
    "OptionSpec",
    "ParallelSection",
    "PluginsSection",
    "SchedulerSection",
    "Section",
    "option",
    "option_table",
    "parse_bytes",
]

S = TypeVar("S", bound=BaseModel)

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(value: Any) -> Any:
    """Turn `"2GiB"`, `"500 MB"` or a number into bytes."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError("must be bytes: a positive number, or one with a unit such as 2GiB or 500MB")
        return int(float(match[1]) * _UNITS[match[2].lower()])
    return value


def option(
    default: Any,
    help: str,
    *,
    flat: str | None = None,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    **limits: Any,
) -> Any:
    """Declare an option: its default, a line of help, its flat name and flags' hidden aliases.

    secret: its value is not shown to anybody, whatever prints options.
    """
    extra: dict[str, Any] = {"flat": flat, "aliases": list(aliases), "secret": secret}
    return Field(default, description=help, json_schema_extra=extra, **limits)


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "description": "bytes: a number, or one with a unit"}),
]


class Section(BaseModel):
    """Base of every section, core's and plugins': frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    aliases: ClassVar[tuple[str, ...]] = ()
    """Hidden names of the section as a whole, as keyword, flag and in a file."""


class SchedulerSection(Section):
    """Who runs when, and how much a step holds."""

    name: str = option("unified", "Scheduler to use.", flat="scheduler_name")
    policy: str = option(
        "fcfs", "Order of requests: fcfs, priority, or a plugin's.", flat="scheduling_policy"
    )
    max_num_seqs: int = option(64, "Most requests that run at once.", ge=1)
    max_num_batched_tokens: int = option(2048, "Most tokens computed in one step.", ge=1)
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens of one request in a step while others run too; 0: no limit.", ge=0
    )


class CacheSection(Section):
    """Memory for keys and values."""

    block_size: int = option(16, "Tokens a KV block.", ge=1, le=1024)
    num_kv_blocks: int | None = option(
        None, "KV blocks; overrides kv_cache_memory.", ge=1, aliases=("num_gpu_blocks_override",)
    )
    kv_cache_memory: Bytes | None = option(
        None, "Memory for the KV cache, such as 2GiB.", gt=0, aliases=("kv_cache_memory_bytes",)
    )
    prefix_caching: bool = option(
        True, "Reuse the KV of prompts that begin alike.", flat="enable_prefix_caching"
    )
    gpu_memory_utilization: float | None = option(
        None, "Share of a GPU's memory to use; on a CPU use kv_cache_memory.", gt=0, le=1
    )
    kv_cache_dtype: str = option("auto", "Type of cached keys and values: auto is that of the model; int8.")
    manager: str = option("paged", "KV cache manager to use.", flat="kv_cache_manager")


class ParallelSection(Section):
    """How many processes and devices share the work."""

    engine_process: bool | None = option(
        None, "Run the engine loop in a process of its own; default: when serving."
    )
    executor: str = option("uniproc", "Where steps run.", aliases=("distributed_executor_backend",))
    tensor_parallel_size: int = option(1, "Ranks that split every layer.", ge=1, aliases=("tp",))
    pipeline_parallel_size: int = option(1, "Ranks that split the stack of layers.", ge=1, aliases=("pp",))


class AttentionSection(Section):
    """Which attention backend runs."""

    backend: str = option(
        "auto", "Attention backend; auto takes the first that fits.", flat="attention_backend"
    )


class PluginsSection(Section):
    """What is loaded besides the built-in plugins."""

    files: list[str] = option([], "Python files with plugins.", flat="plugin_files")
    enable: list[str] = option(
        [], "Installed plugins that must load; the start fails without them.", flat="enable_plugins"
    )
    disable: list[str] = option([], "Plugins to leave out, by name.", flat="disable_plugins")
    options: dict[str, dict[str, Any]] = option({}, "Options by plugin name.", flat="plugin_options")


class EngineConfig(Section):
    """Everything an engine is started with."""

    model: str = option(..., "Alias, path, or source:reference of the model.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option("auto", "Type to compute in.")
    quantization: str | None = option(
        None,
        "How weights are held: gguf, int8, or another method. Default: as the checkpoint's configuration says, "
        "else as numbers of `dtype`.",
        aliases=("q",),
    )
    max_model_len: int | None = option(
        None, "Longest prompt and answer together; default: the model's.", ge=2
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for a token; -1: no limit.", ge=-1)
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        "Of what logprobs are told: raw, the model's own; processed, those a token is drawn from.",
    )
    enforce_eager: bool = option(False, "Run the model as it is, not as a recorded pass (a graph).")
    model_impl: str = option("auto", "Which definition builds the model; auto: by its architecture.")
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "Sampling defaults: auto takes the model's own where a request sets nothing, none leaves them out.",
    )
    show_report: bool = option(True, "Write the start-up report to standard error.")
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    parallel: ParallelSection = ParallelSection()
    attention: AttentionSection = AttentionSection()
    plugins: PluginsSection = PluginsSection()
    sections: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """Sections of plugins by name, each an instance of the model that the plugin registered."""

    def section(self, name: str, model: type[S]) -> S:
        """Return a plugin's section; its defaults where nothing was set."""
        value = self.sections.get(name)
        if value is None:
            return model()
        if not isinstance(value, model):
            raise ConfigError(
                f"section {name!r} is a {type(value).__name__}, not a {model.__name__}", option=name
            )
        return value

    @classmethod
    def base_sections(cls) -> Mapping[str, type[Section]]:
        """Core's own sections by name."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        }


@dataclass(frozen=True)
class OptionSpec:
    """One option of the union: where it lives and under which names it may be given."""

    flat: str
    """Its name everywhere: keyword, flag (with dashes) and top of the file."""
    section: str
    """Empty for options that stand outside of sections, such as `model`."""
    field: str
    info: FieldInfo
    aliases: tuple[str, ...] = ()
    secret: bool = False
    """Its value is not shown."""
    section_names: tuple[str, ...] = ()
    """Every spelling of its section: its name, then hidden ones."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling at the top: the flat name, then hidden ones."""
        return (self.flat, *self.aliases)


def option_table(sections: Mapping[str, type[BaseModel]]) -> dict[str, OptionSpec]:
    """Return every option by flat name: core's, then those of `sections` (the plugins').

    Raises `ConfigError` when a section or an option is called like another one, and when an option of a plugin
    has no default.
    """
    base = EngineConfig.base_sections()
    table: dict[str, OptionSpec] = {}
    owners = {name: f"the section {name!r}" for name in base}
    models: dict[str, type[BaseModel]] = {"": EngineConfig, **base}
    for name, model in sections.items():
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise TypeError(f"the section {name!r} must be a subclass of Section, got {model!r}")
        _claim(owners, name, f"the section {name!r} of a plugin")
        for alias in _section_aliases(model):
            _claim(owners, alias, f"the section {name!r} of a plugin")
        models[name] = model
    for section, model in models.items():
        for field, info in model.model_fields.items():
            if section == "" and (field in base or field == "sections"):
                continue
            spec = _spec(section, field, info, _section_aliases(model))
            if section in sections and info.is_required():
                raise TypeError(f"the option {section}.{field} must have a default")
            for name in spec.names:
                _claim(owners, name, f"the option {section + '.' if section else ''}{field}")
            table[spec.flat] = spec
    return table


def _section_aliases(model: type[BaseModel]) -> tuple[str, ...]:
    return model.aliases if issubclass(model, Section) else ()


def _spec(section: str, field: str, info: FieldInfo, section_aliases: tuple[str, ...]) -> OptionSpec:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    aliases = extra.get("aliases")
    names = tuple(str(alias) for alias in aliases) if isinstance(aliases, list) else ()
    return OptionSpec(
        str(extra.get("flat") or field),
        section,
        field,
        info,
        names,
        secret=bool(extra.get("secret")),
        section_names=(section, *section_aliases) if section else (),
    )


def _claim(owners: dict[str, str], name: str, owner: str) -> None:
    if name in owners:
        raise ConfigError(
            f"{owner} is called {name!r}, and so is {owners[name]}; one must take another name "
            "(option(..., flat=...) gives an option another)",
            option=name,
        )
    owners[name] = owner
