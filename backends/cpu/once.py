"""Files that appear whole or not at all, however many processes make them at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["create_once", "partial_folder"]

_PARTIAL = ".partial-"


def create_once(target: Path, make: Callable[[Path], Path]) -> Path:
    """Return `target`, calling `make` if it is not there yet; processes that ask meanwhile wait for the first.

    make: is given an empty folder on the target's file system and returns the finished file in it, which is then
    moved to `target` in one step.
    Raises `OSError` where the folder cannot be written, and what `make` raises.
    """
    if target.exists():
        return target
    from filelock import FileLock  # not needed where the file is there

    target.parent.mkdir(parents=True, exist_ok=True)
    # The system lets go of the lock when its holder dies, whatever it dies of.
    with FileLock(target.parent / ".lock"):
        if target.exists():
            return target
        for stale in target.parent.glob(f"{_PARTIAL}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with partial_folder(target.parent) as folder:
            os.replace(make(folder), target)
    return target


@contextmanager
def partial_folder(parent: Path) -> Iterator[Path]:
    """An empty folder in `parent`, to write in what is moved away when it is finished; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
