"""What a source gives, option by option: flat names, hidden aliases and nested sections all end in one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from headrace.configuration.yaml_file import ConfigFile
from headrace.core.config import OptionSpec
from headrace.core.errors import ConfigError, nearest

__all__ = ["Given", "Source", "given_by_call", "given_by_file"]

Kind = Literal["default", "file", "flag", "keyword", "argument", "adjusted"]


@dataclass(frozen=True)
class Source:
    """Where a value comes from."""

    kind: Kind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True)
class Given:
    """One value that somebody gave."""

    value: Any
    source: Source
    spelling: str


def given_by_file(file: ConfigFile, table: Mapping[str, OptionSpec]) -> dict[str, Given]:
    """Return by flat name what a file gives. Null stays null; plugin files are relative to the file's folder.

    Raises `ConfigError` for an unknown key, a section that is none, and an option given twice.
    """
    given = _collect(file.data, table, lambda key: Source("file", file.place(key)), keep_null=True)
    files = given.get("plugin_files")
    if files is not None and isinstance(files.value, list):
        folder = file.path.resolve().parent
        paths = [str(folder / Path(p).expanduser()) if isinstance(p, str) else p for p in files.value]
        given["plugin_files"] = replace(files, value=paths)
    return given


def given_by_call(
    data: Mapping[str, Any], table: Mapping[str, OptionSpec], kind: Literal["flag", "keyword"]
) -> dict[str, Given]:
    """Return by flat name what flags or keywords give; None means not given.

    Raises `ConfigError` as `given_by_file` does.
    """

    def source(key: tuple[str, ...]) -> Source:
        return Source(kind, "--" + key[0].replace("_", "-") if kind == "flag" else ".".join(key))

    return _collect(data, table, source, keep_null=False)


def _collect(
    data: Mapping[str, Any],
    table: Mapping[str, OptionSpec],
    source: Callable[[tuple[str, ...]], Source],
    *,
    keep_null: bool,
) -> dict[str, Given]:
    given: dict[str, Given] = {}
    top = {name: spec for spec in table.values() for name in spec.names}
    sections = {name: spec.section for spec in table.values() for name in spec.section_names}

    def put(spec: OptionSpec, value: Any, key: tuple[str, ...]) -> None:
        if value is None and not keep_null:
            return
        spelling = ".".join(key)
        known = given.get(spec.flat)
        if known is not None:
            raise ConfigError(
                f"{spec.flat} is given twice: as {known.spelling} ({known.source}) and as {spelling} "
                f"({source(key)}); keep one",
                option=spec.flat,
            )
        given[spec.flat] = Given(_plain(value), source(key), spelling)

    for key, value in data.items():
        name = key.replace("-", "_")
        if name in top:
            put(top[name], value, (key,))
        elif name not in sections:
            raise _unknown(key, None, table, source((key,)))
        elif value is None and not keep_null:
            continue
        else:
            section = sections[name]
            inner = {n: s for s in table.values() if s.section == section for n in (*s.names, s.field)}
            for sub, item in _section(section, value, source((key,))).items():
                spec = inner.get(str(sub).replace("-", "_"))
                if spec is None:
                    raise _unknown(str(sub), section, table, source((key, str(sub))))
                put(spec, item, (key, str(sub)))
    return given


def _section(name: str, value: Any, source: Source) -> Mapping[Any, Any]:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        found = "null" if value is None else repr(value)
        raise ConfigError(
            f"section {name} must hold options by name, such as {{option: value}}, got {found} ({source}); "
            "leave it out for the defaults",
            option=name,
        )
    return value


def _plain(value: Any) -> Any:
    """Turn what only Python has into what a file could hold."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _unknown(key: str, section: str | None, table: Mapping[str, OptionSpec], source: Source) -> ConfigError:
    """Name the nearest right key and its section."""
    name = key.replace("-", "_")
    sections = {spec.section for spec in table.values() if spec.section}
    top = {word: spec for spec in table.values() for word in spec.names}
    if section is None:
        hint = nearest(name, [*table, *sections])
        fields = [
            f"{spec.section}.{spec.field}" for spec in table.values() if spec.section and spec.field == name
        ]
        if fields and not hint:
            hint = f" (did you mean {' or '.join(fields)}?)"
        return ConfigError(f"unknown option {key!r}{hint}; {source}", option=key)
    if name in top:
        home = top[name].section
        where = f"belongs to section {home}" if home else "stands outside of sections"
        return ConfigError(f"unknown option {key!r} in section {section}: it {where}; {source}", option=key)
    fields = [spec.field for spec in table.values() if spec.section == section]
    hint = nearest(name, fields)
    if not hint:
        elsewhere = nearest(name, table)
        hint = elsewhere or f"; it has: {', '.join(fields)}"
    return ConfigError(f"unknown option {key!r} in section {section}{hint}; {source}", option=key)
