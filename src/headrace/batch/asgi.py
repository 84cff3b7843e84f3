"""An HTTP application as handler of a batch: called in this process, with no socket between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from headrace.batch.run import Handler

__all__ = ["Application", "asgi_handler"]

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
"""What ASGI calls an application."""


def asgi_handler(application: Application, headers: dict[str, str] | None = None) -> Handler:
    """Return a handler that puts requests to an application, which must be started already.

    headers: sent with each, beside the type of the content.
    """
    sent = {"host": "batch", "content-type": "application/json", **(headers or {})}

    async def handle(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        data = msgspec.json.encode(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {**sent, "content-length": str(len(data))}.items()
            ],
            "client": None,
            "server": None,
            "state": {},
        }
        exchange = _Exchange(data)
        await application(scope, exchange.receive, exchange.send)
        return exchange.result()

    return handle


class _Exchange:
    """One request's body on its way in, and its answer on its way out."""

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data
        self._status = 500
        self._answer: list[bytes] = []

    async def receive(self) -> Message:
        if self._data is None:
            # The client is never gone: an application that waits for that waits until it is cancelled.
            await asyncio.Event().wait()
        body, self._data = self._data, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif message["type"] == "http.response.body":
            self._answer.append(message.get("body", b""))

    def result(self) -> tuple[int, dict[str, Any]]:
        data = b"".join(self._answer)
        try:
            body = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = None
        if not isinstance(body, dict):
            body = {"error": {"message": data.decode(errors="replace")[:1000], "code": self._status}}
        return self._status, body
