"""The source `path`: a file or folder that is already here."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.interfaces.checkpoint import Progress

__all__ = ["PathSource"]


class PathSource:
    """Local files; see `headrace.core.interfaces.ModelSource`."""

    name = "path"

    def resolve(self, reference: str, progress: Progress | None = None) -> Path:
        """Return the file or folder. Raises `CheckpointError` if there is none."""
        path = Path(reference).expanduser()
        if path.exists():
            return path
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        raise CheckpointError(f"no file or folder is called {reference!r}; the path exists up to {folder}")
