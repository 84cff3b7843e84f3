"""The cache folder: files appear in it whole or not at all, and are fetched once however many processes ask."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.folders import cache_folder

__all__ = ["cache_folder", "fetch_once"]

_PARTIAL = ".partial-"


def fetch_once(target: Path, fetch: Callable[[Path], Path], *, what: str) -> Path:
    """Return `target`, calling `fetch` if it is not there yet.

    fetch: is given an empty folder on the target's file system, to do all its writing in, and returns the finished
    file or folder there, which is then moved to `target` in one step. Processes that ask at the same time wait for
    the first.
    what: names the model in errors.
    Raises `CheckpointError` where the folder cannot be written or is full, and what `fetch` raises.
    """
    if target.exists():
        return target
    from filelock import FileLock  # not needed where everything is there

    with _explained(target.parent, what):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The system lets go of the lock when its holder dies, whatever it dies of.
        with FileLock(target.parent / ".lock"):
            if target.exists():
                return target
            for stale in target.parent.glob(f"{_PARTIAL}*"):
                shutil.rmtree(stale, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
            try:
                os.replace(fetch(folder), target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return target


@contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    """Turn the system's errors into ones that say what to do."""
    advice = "set HEADRACE_CACHE to a folder that can be written and has room"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"no room left in {folder} for {what}: free some, or {advice}") from error
        raise CheckpointError(
            f"the cache folder {folder} cannot be used for {what}: {error.strerror or error}; {advice}"
        ) from error
