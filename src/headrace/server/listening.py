"""The socket a server listens on: bound before anything slow begins, so that a port in use is told at once."""

from __future__ import annotations

import contextlib
import socket

from headrace.core.errors import ConfigError
from headrace.server.options import ServerSection

__all__ = ["listen", "url_of"]

BACKLOG = 2048


def listen(options: ServerSection) -> socket.socket:
    """Bind and listen. Raises `ConfigError` where the address cannot be had."""
    where = f"{options.host}:{options.port}"
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError(
            f"host {options.host!r} is no address of this machine: {error.strerror}; the option is host",
            option="host",
        ) from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        with contextlib.suppress(OSError):
            sock.close()
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another port (--port, 0 takes any that is free) or "
            "host (--host)",
            option="port",
        ) from None
    return sock


def url_of(sock: socket.socket, options: ServerSection) -> str:
    """Return where clients find the server."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if options.ssl_certfile else ''}://{shown}:{port}"
