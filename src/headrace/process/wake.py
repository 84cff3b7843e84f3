"""What the engine loop sleeps on when requests arrive through a socket: the socket itself, and calls of `set`."""

from __future__ import annotations

import contextlib
import os
import threading

import zmq

__all__ = ["SocketWake"]


class SocketWake:
    """Implements `headrace.core.engine.Wake`: woken by `set`, from any thread, or by a message that waits."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._read, zmq.POLLIN)
        self._closing = threading.Lock()
        """Held while the pipe is written and while it is closed: its number may be another file's right after."""
        self._closed = False

    def set(self) -> None:
        """Wake the loop; once it has ended, nothing happens."""
        with self._closing, contextlib.suppress(BlockingIOError):  # a full pipe wakes it as well
            if not self._closed:
                os.write(self._write, b"\0")

    def wait(self, timeout: float | None) -> bool:
        """Sleep until woken, at most `timeout` seconds; None: for ever."""
        return bool(self._poller.poll(None if timeout is None else int(timeout * 1000)))

    def clear(self) -> None:
        """Forget calls of `set`; a message stays until it is read."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close the pipe; may be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            os.close(self._read)
            os.close(self._write)
