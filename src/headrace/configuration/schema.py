"""The JSON schema of the whole union, for editors and for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from headrace.core.config import EngineConfig, option_table

__all__ = ["json_schema"]


def json_schema(sections: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the schema of a configuration file: sections, and every option flat at the top.

    sections: those that plugins registered, by name.
    """
    table = option_table(sections)
    models: dict[str, type[BaseModel]] = {**EngineConfig.base_sections(), **sections}
    definitions: dict[str, Any] = {}
    schemas = {name: _clean(_schema(name, model, definitions)) for name, model in models.items()}
    top = _clean(_schema("", EngineConfig, {}))["properties"]
    properties: dict[str, Any] = {}
    for flat, spec in table.items():
        properties[flat] = (schemas[spec.section]["properties"] if spec.section else top)[spec.field]
    properties |= schemas
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Headrace configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
    }
    if definitions:
        schema["$defs"] = _clean(definitions)
    return schema


def _schema(name: str, model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a section's schema; models within it go to `definitions` under the section's name."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    definitions.update({f"{name}.{key}": value for key, value in schema.pop("$defs", {}).items()})
    return schema


def _clean(node: Any) -> Any:
    """Leave out what only we read: flat names and aliases."""
    if isinstance(node, dict):
        # A property that is called so has a schema, which is a mapping.
        return {
            key: _clean(value)
            for key, value in node.items()
            if key not in ("flat", "aliases") or isinstance(value, dict)
        }
    if isinstance(node, list):
        return [_clean(item) for item in node]
    return node
