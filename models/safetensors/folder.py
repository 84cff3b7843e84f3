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
    """Return the chat template; None: there is none.

    It is a file of its own (`chat_template.jinja`, before that `chat_template.json`), or a field of
    tokenizer_config.json, where it may be one of several with names. Raises `CheckpointError` naming a damaged file.
    """
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{own} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{own} is damaged: it is no UTF-8 ({error})") from None
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        template = read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(template, list):
            template = {
                item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)
            }
        if isinstance(template, Mapping):
            template = template.get("default")
        if isinstance(template, str):
            return template
    return None


def tokenizer_files(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return what the tokenizer `tokenizer_json` needs, or None where there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    settings = folder / "tokenizer_config.json"
    ends = _end_ids(folder / "generation_config.json", generation) or _end_ids(folder / "config.json", config)
    return {
        "kind": "tokenizer_json",
        "path": str(file),
        "settings": read_json(settings) if settings.is_file() else {},
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": ends,
    }


def _end_ids(file: Path, fields: Mapping[str, Any]) -> list[int]:
    """Return eos_token_id, which may be one or several. Raises `CheckpointError` naming file and field."""
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise CheckpointError(
            f"{file}: eos_token_id must be a token id or a list of them, got {value!r:.100}"
        )
    return ids
