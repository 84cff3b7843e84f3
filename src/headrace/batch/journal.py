"""The output of a batch: finished lines, each written whole and at once, so that an ended run can be continued.

Nothing but this file remembers how far a run came. A line that was cut short when a process was killed is dropped by
the next run, as are answers that only say that the server failed; every other line stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from headrace.batch.lines import Key, key_of
from headrace.core.errors import ConfigError

__all__ = ["Journal", "open_journal", "worth_retrying"]

START = b'{"id":"batch_req_'
"""How every line begins: what is cut off before the end can be told from what never was a result."""
TOO_MANY, SERVER_ERROR = 429, 500


class Journal:
    """The lines that are there, and the file to which more are added; made by `open_journal`."""

    def __init__(self, path: Path, file: FileIO, done: set[Key]) -> None:
        self._path = path
        self._file = file
        self.done = done
        """Keys of the lines that are finished."""

    def write(self, entry: dict[str, Any], key: Key) -> None:
        """Add a finished line. Raises `ConfigError` where it cannot be written, as on a full disk."""
        data = memoryview(msgspec.json.encode(entry) + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _wrong(self._path, f"it cannot be written: {error.strerror}") from None
        self.done.add(key)


@contextmanager
def open_journal(path: Path, keys: Set[Key]) -> Iterator[Journal]:
    """Open an output file, new or begun, for one run at a time.

    keys: those of the input.
    Raises `ConfigError` where another run has it open, where it holds anything but results of this input, or where it
    cannot be written.
    """
    from filelock import FileLock, Timeout

    path = path.resolve()
    if path.exists() and not path.is_file():
        raise _wrong(path, "it must be a file")
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(lock).acquire(blocking=False))
            stack.callback(lock.unlink, missing_ok=True)
            done = _cleaned(path, keys)
            file = stack.enter_context(FileIO(path, "a"))
        except Timeout:
            raise _wrong(path, "another run is writing it") from None
        except OSError as error:
            raise _wrong(path, f"it cannot be written: {error.strerror}") from None
        yield Journal(path, file, done)
        os.fsync(file.fileno())


def worth_retrying(status: int) -> bool:
    """Whether a status is the server's fault or load, and may be another one next time."""
    return status == TOO_MANY or status >= SERVER_ERROR


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    line: int = 0


class _Entry(msgspec.Struct):
    """What matters here of a line."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None

    @property
    def key(self) -> Key:
        return key_of(self.custom_id, self.error.line if self.error else 0)

    @property
    def finished(self) -> bool:
        return self.response is None or not worth_retrying(self.response.status_code)


def _cleaned(path: Path, keys: Set[Key]) -> set[Key]:
    """Drop the lines of a begun file that are to be done again; return the keys of the others.

    The file is replaced in one step: a run that is ended meanwhile leaves the old one or the new one.
    """
    done: set[Key] = set()
    changed = False
    partial = path.with_name(f".{path.name}.partial")
    try:
        with path.open("rb") as begun, partial.open("wb") as kept:
            for number, data in enumerate(begun, 1):
                entry = _read(path, number, data)
                if entry is not None and entry.key not in keys:
                    which = f"line {entry.key[1]}" if entry.custom_id is None else repr(entry.custom_id)
                    raise _wrong(path, f"it holds a result for {which}, which is not in the input file")
                changed |= entry is None or not entry.finished or not data.endswith(b"\n")
                if entry is not None and entry.finished:
                    kept.write(data.removesuffix(b"\n") + b"\n")
                    done.add(entry.key)
            kept.flush()
            os.fsync(kept.fileno())
        if changed:
            partial.replace(path)
    except FileNotFoundError:
        return done
    finally:
        partial.unlink(missing_ok=True)
    return done


def _read(path: Path, number: int, data: bytes) -> _Entry | None:
    """Return a line's entry, or None for one that was cut short. Raises `ConfigError` for anything else."""
    try:
        return msgspec.json.decode(data, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if not data.endswith(b"\n") and data[: len(START)] == START[: len(data)]:
            return None
        raise _wrong(path, f"its line {number} is no result of a batch") from None


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError(f"--output-file {path}: {why}; name another file", option="output_file")
