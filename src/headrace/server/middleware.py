"""What every request passes: a proxy's path, the key, its own name.

All of it is plain ASGI: streams pass it chunk by chunk.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.errors import ApiError
from headrace.server.handlers import error_response

__all__ = ["FREE", "ApiKeys", "RequestIds", "RootPath"]

FREE = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})
"""Paths that no key is asked for: whoever looks after the server asks them."""

MAX_ID = 128


class ApiKeys:
    """Lets those pass who bring one of the keys as `Authorization: Bearer KEY`; all paths but `FREE` ask for it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "lifespan" or path in FREE or self._allows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            error = ApiError(
                401,
                "this server asks for a key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    return False
                given = given.strip()
        # All are compared: the time must not tell which key was nearly right.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


class RequestIds:
    """Sends a caller's `X-Request-Id` back, and keeps it as `state.request_id` for logs.

    It names nothing in the engine, so callers may use one twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        name = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), b"")[:MAX_ID]
        if scope["type"] != "http" or not name or not all(0x20 <= byte < 0x7F for byte in name):
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = name.decode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, send_named)


class RootPath:
    """Tells the routes below which path a proxy serves them; whether it strips that from requests does not matter."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope["root_path"] = self._root_path
        await self._app(scope, receive, send)
