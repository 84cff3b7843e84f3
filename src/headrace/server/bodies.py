"""Reading a request's body: within a limit, as strict JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope

from headrace.server.errors import ApiError, short

__all__ = ["ClientGone", "parse_json", "read_json"]


MAX_DEPTH = 200


class ClientGone(Exception):  # noqa: N818 - nobody is wrong, and nobody is told
    """The client hung up before it had sent its request."""


async def read_json(scope: Scope, receive: Receive, limit: int) -> dict[str, Any]:
    """Return the body, a JSON object of at most `limit` bytes.

    Raises `ApiError`: 413 before more than the limit was kept, 400 for what is no JSON object.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    kind = headers.get(b"content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, f"the body must be application/json, got Content-Type {short(kind)}")
    length = headers.get(b"content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parse_json(b"".join(parts))


def parse_json(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises `ApiError` for anything else, NaN and Infinity among it."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is no JSON that can be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {short(value)}")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH}")
    return value


def _is_deep(value: dict[str, Any]) -> bool:
    """Return whether values lie deeper than `MAX_DEPTH`: what reads them by recursion must not fall over it."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {limit} bytes, the limit of this server (max_body_bytes)",
        code="request_too_large",
    )
