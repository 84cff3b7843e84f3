"""Where an adapter lies, and the name of what lies there: all that a front end needs to know, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import RequestError

__all__ = [
    "AdapterMissingError",
    "check_root",
    "digest_of",
    "digest_of_bytes",
    "files_of",
    "read_bytes",
    "stamp",
]

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order of preference."""


class AdapterMissingError(RequestError):
    """There is nothing at an adapter's path."""


def check_root(path: Path, roots: Sequence[Path]) -> None:
    """Raise `RequestError` for a path that is below none of `roots`, links followed; none: any path will do."""
    real = path.expanduser().resolve()
    if roots and not any(real == root or root in real.parents for root in roots):
        raise RequestError(
            f"the adapter's path {str(path)!r:.300} is outside of the folders that are allowed: "
            f"{', '.join(map(str, roots))} (lora_roots)",
            param="lora_path",
        )


def stamp(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes when an adapter's files do, without reading them. Raises `AdapterMissingError`."""
    found = []
    for file in files_of(path):
        status = file.stat()
        found.append((file.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def digest_of(path: Path) -> str:
    """Return the name of an adapter's content. Raises `AdapterMissingError`, or `RequestError` naming a file."""
    return digest_of_bytes([read_bytes(file) for file in files_of(path)])


def files_of(path: Path) -> tuple[Path, Path]:
    """Return the files of configuration and weights. Raises `AdapterMissingError`, or `RequestError`."""
    folder = path.expanduser()
    if not folder.is_dir():
        raise AdapterMissingError(
            f"no adapter at {str(path)!r:.300}: there is no such folder", param="lora_path"
        )
    if not (folder / CONFIG).is_file():
        raise RequestError(f"{folder} is no adapter: it has no {CONFIG}", param="lora_path")
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / CONFIG, folder / name
    raise RequestError(
        f"{folder} has no weights of an adapter; looked for: {', '.join(WEIGHTS)}", param="lora_path"
    )


def read_bytes(file: Path) -> bytearray:
    """Read a file whole. Raises `RequestError` naming it."""
    try:
        with file.open("rb") as opened:
            data = bytearray(file.stat().st_size)
            count = opened.readinto(data)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}", param="lora_path") from None
    del data[count:]
    return data


def digest_of_bytes(parts: Sequence[bytearray]) -> str:
    """Return the name of a content, from the bytes of its files."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
