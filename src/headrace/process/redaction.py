"""A configuration as a log may show it: what is secret left out."""

from __future__ import annotations

import re
from typing import Any

from headrace.core.config import EngineConfig

__all__ = ["config_for_log"]

_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def config_for_log(config: EngineConfig) -> dict[str, Any]:
    """Return the options that were set, plugins' sections included; texts under names like `api_key` are hidden."""
    told = config.model_dump(exclude_defaults=True)
    for name, section in config.sections.items():
        told[name] = section.model_dump(exclude_defaults=True)
    return {name: _hidden(name, value) for name, value in told.items() if value != {}}


def _hidden(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(str(key), part) for key, part in value.items()}
    is_text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    return "***" if is_text and _SECRET.search(name) else value
