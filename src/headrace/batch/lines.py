"""The input of a batch: a line is a request, or says why it is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import ConfigError

__all__ = ["URLS", "BatchLine", "Key", "check_lines", "key_of", "read_lines"]

URLS = ("/v1/chat/completions", "/v1/completions")
SHOWN = 3
"""How many repeated ids are told."""

Key = tuple[str | None, int]
"""By which a line and its answer are matched: the custom_id, or where there is none, the line's number."""


@dataclass(frozen=True)
class BatchLine:
    """One line that is not blank."""

    number: int
    """Of the line in the file, from 1."""
    custom_id: str | None
    """None where it has none."""
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it cannot be run; empty where it can."""

    @property
    def key(self) -> Key:
        """By which its answer is found."""
        return key_of(self.custom_id, self.number)


def key_of(custom_id: str | None, number: int) -> Key:
    """Return the key of a line and of its answer."""
    return (None, number) if custom_id is None else (custom_id, 0)


def read_lines(path: Path) -> Iterator[BatchLine]:
    """Read a file line by line. Raises `ConfigError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data := data.removeprefix(b"\xef\xbb\xbf").strip():
                    yield _line(number, data)
    except OSError as error:
        raise ConfigError(
            f"--input-file {path} cannot be read: {error.strerror}", option="input_file"
        ) from None


def check_lines(path: Path) -> set[Key]:
    """Return the keys of all lines.

    Raises `ConfigError` where two lines have one custom_id, where there is no line, or where it cannot be read.
    """
    first: dict[Key, int] = {}
    repeated: list[str] = []
    for line in read_lines(path):
        if line.key in first:
            repeated.append(f"{line.custom_id!r} on lines {first[line.key]} and {line.number}")
        first.setdefault(line.key, line.number)
    if repeated:
        more = f" and {len(repeated) - SHOWN} more" if len(repeated) > SHOWN else ""
        raise ConfigError(
            f"--input-file {path}: answers are found by custom_id, so each may be there once; there is "
            f"{', '.join(repeated[:SHOWN])}{more}",
            option="input_file",
        )
    if not first:
        raise ConfigError(f"--input-file {path} holds no request", option="input_file")
    return set(first)


def _line(number: int, data: bytes) -> BatchLine:
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchLine(number, None, error=f"it is not JSON: {error}")
    if not isinstance(content, dict):
        return BatchLine(number, None, error=f"it must be a JSON object, got {content!r:.100}")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(
            number, None, error=f"custom_id must be a text that is not empty, got {custom_id!r:.100}"
        )
    url, body = content.get("url"), content.get("body")
    if why := _why_not(content.get("method"), url, body):
        return BatchLine(number, custom_id, error=why)
    return BatchLine(number, custom_id, str(url), body or {})


def _why_not(method: Any, url: Any, body: Any) -> str:
    if method != "POST":
        return f"method must be POST, got {method!r:.100}"
    if url not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {url!r:.100}"
    if not isinstance(body, dict):
        return f"body must be a JSON object, got {body!r:.100}"
    if body.get("stream"):
        return "body.stream must be false or left out: an answer is one line"
    return ""
