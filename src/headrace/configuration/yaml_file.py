"""Reading a configuration file: YAML with the words of version 1.2, without surprises.

Only `true` and `false` are booleans (`yes`, `no`, `on`, `off` are text), only `null`, `~` and nothing are null,
dates and sexagesimal numbers are text, `1e3` is a number, and a key that stands twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import ConfigError

__all__ = ["ConfigFile", "read_file"]


@dataclass(frozen=True)
class ConfigFile:
    """A file's content and where its keys stand."""

    path: Path
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Line, from 1, of each key at the top and within a section."""

    def place(self, key: tuple[str, ...]) -> str:
        """Say where a key stands: `engine.yaml, line 3`."""
        line = self.lines.get(key)
        return f"{self.path}, line {line}" if line else str(self.path)


class _Loader(yaml.SafeLoader):
    """PyYAML reads version 1.1; these are the rules of 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} stands twice, in lines {seen[key]} and {line}",
                    key_node.start_mark,
                )
            if isinstance(key, Hashable):
                seen[key] = line
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _floating(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _floating)


def read_file(path: str | Path) -> ConfigFile:
    """Read one YAML file whose top is a mapping; an empty file is an empty one.

    Raises `ConfigError` with file and line when it cannot be read, is no YAML, or has a key twice.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}", option="config") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}{_place(error)}", option="config") from None
    finally:
        loader.dispose()
    if data is None:
        return ConfigFile(file, {})
    if not isinstance(data, dict):
        raise ConfigError(
            f"{file} must hold a mapping such as `max_num_seqs: 64`, got a {type(data).__name__}",
            option="config",
        )
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{file}: a key must be text, got {key!r}", option="config")
    return ConfigFile(file, data, _lines(node, ()))


def _lines(node: yaml.Node | None, prefix: tuple[str, ...]) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*prefix, str(key.value))
            lines[path] = key.start_mark.line + 1
            if not prefix:
                lines.update(_lines(value, path))
    return lines


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f", line {mark.line + 1}: {problem}" if mark is not None else f": {problem}"
