"""The cache folder: the one place on a user's disk that rooms which do not know each other share."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return `$HEADRACE_CACHE`; by default `headrace` below `$XDG_CACHE_HOME` or `~/.cache`. It may not exist yet."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "headrace"
