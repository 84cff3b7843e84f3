"""What a model folder says of pooling, in the files that sentence-transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.plugins.pooling.options import PoolingType

__all__ = ["checkpoint_pooling"]

_FLAGS: dict[str, PoolingType] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_WORDS: dict[str, PoolingType] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def checkpoint_pooling(model_path: Path) -> PoolingType | None:
    """Return how the model was trained to be pooled, or None where nothing beside it says so.

    A folder's `modules.json` lists a module of the type `…Pooling` with a folder whose `config.json` sets one of
    several modes. Raises `CheckpointError` where such a file cannot be read; a mode unknown here counts as
    unsaid, since a request may name another.
    """
    folder = model_path if model_path.is_dir() else model_path.parent
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return None
    for module in modules:
        if isinstance(module, dict) and str(module.get("type", "")).endswith("Pooling"):
            return _mode(_read(folder / str(module.get("path", "")) / "config.json"))
    return None


def _mode(config: Any) -> PoolingType | None:
    if not isinstance(config, dict):
        return None
    word = config.get("pooling_mode")  # newer files name the mode, older ones have a flag a mode
    if isinstance(word, str):
        return _WORDS.get(word)
    on = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value is True]
    return _FLAGS.get(on[0]) if len(on) == 1 else None  # of several, the vectors would have to be joined


def _read(path: Path) -> Any:
    """Return a JSON file's value; None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} says how to pool embeddings and cannot be read: {error}") from error
