"""Checks a conversation and copies it into plain values, so that a template meets nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import RequestError

__all__ = ["plain_messages", "plain_value"]

MAX_DEPTH = 100
"""Of values inside a message."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the conversation in which every content is a text, or None beside tool calls.

    Text parts are joined by line breaks. Raises `RequestError` naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _wrong("messages", f"must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise _wrong("messages", "must hold at least one message")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(place, f"must be a mapping with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{place}.role", f"must be a text such as 'user', got {role!r:.100}")
    plain = {
        str(key): plain_value(value, f"{place}.{key}") for key, value in message.items() if key != "content"
    }
    content = message.get("content")
    if content is not None or not message.get("tool_calls"):
        content = _text(content, f"{place}.content")
    return {**plain, "content": content}


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _wrong(place, f"must be a text or a list of text parts, got {content!r:.100}")
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _wrong(place, f"must be a part such as {{'type': 'text', 'text': …}}, got {part!r:.100}")
    if part.get("type") != "text":
        raise _wrong(
            f"{place}.type", f"this model takes parts of type 'text' only, got {part.get('type')!r:.100}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{place}.text", f"must be a text, got {text!r:.100}")
    return text


def plain_value(value: Any, place: str, depth: int = 0) -> Any:
    """Return a deep copy made of dict, list, str, int, float, bool and None. Raises `RequestError` otherwise."""
    if depth > MAX_DEPTH:
        raise _wrong(place.split("[", 1)[0], f"is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise _wrong(place, f"must be made of JSON values, got {type(value).__name__}")


def _wrong(place: str, what: str) -> RequestError:
    return RequestError(f"{place} {what}", param=place)
