"""What lies in a Hugging Face folder beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError

__all__ = ["chat_template", "read_json", "tokenizer_files"]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or cut off: it is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def chat_template(folder: Path) -> str | None:
    """Return the chat template: a file of its own, or a field of tokenizer_config.json; None: there is none."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def tokenizer_files(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return what the tokenizer `tokenizer_json` needs, or None where there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    settings = folder / "tokenizer_config.json"
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    return {
        "kind": "tokenizer_json",
        "path": str(file),
        "settings": read_json(settings) if settings.is_file() else {},
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": [] if ends is None else [ends] if isinstance(ends, int) else list(ends),
    }
