"""A real server for tests: starting `headrace serve`, asking it, and seeing what is left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Open", "Server", "reserved_port", "serving"]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, and that a server with `SO_REUSEADDR` can listen on."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


@dataclass
class Open:
    """A request that is being answered, on a thread."""

    thread: threading.Thread
    status: int = 0
    body: str = ""
    error: str = ""
    ended: float = 0.0

    def wait(self, seconds: float = 30) -> Open:
        """Wait for its end."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "a request hangs"
        return self


@dataclass
class Server:
    """A `headrace serve` process, and what a test asks of it."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    folder: Path
    """Where its sockets lie."""

    def children(self, kind: str) -> list[psutil.Process]:
        """Processes by title: `core`, `api`."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
                if child.cmdline()[0].startswith(f"headrace-{kind}-"):
                    found.append(child)
        return found

    def get(self, path: str) -> tuple[int, Any]:
        """Ask by GET; the body as JSON where it is."""
        return self.ask("GET", path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Ask by POST."""
        return self.ask("POST", path, body, headers)

    def complete(self, **body: Any) -> tuple[int, Any]:
        """Ask for a completion."""
        return self.post("/v1/completions", {"temperature": 0, **body})

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Ask, and read the answer to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def begin(self, **body: Any) -> Open:
        """Ask for a completion, on a thread."""

        def run() -> None:
            try:
                status, answer = self.complete(**body)
                opened.status, opened.body = status, answer if isinstance(answer, str) else json.dumps(answer)
            except (OSError, http.client.HTTPException) as error:
                opened.error = f"{type(error).__name__}: {error}"
            opened.ended = time.monotonic()

        opened = Open(threading.Thread(target=run, daemon=True))
        opened.thread.start()
        return opened

    def metric(self, name: str) -> float:
        """One series without labels of its own."""
        _, text = self.get("/metrics")
        found = re.findall(rf"^headrace:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert len(found) == 1, (name, text)
        return float(found[0])

    def wait_until(self, what: Any, seconds: float = 30) -> None:
        """Wait until a call returns something true."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (
                f"it did not happen within {seconds} s; {self.log.read_text()}"
            )
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Whether it takes requests."""
        try:
            return self.get("/ready")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def is_announced(self) -> bool:
        """Whether all its processes are there, as its log says: `/ready` is the word of one of them."""
        return f"://127.0.0.1:{self.port}" in self.log.read_text()

    def wait_running(self, count: int) -> None:
        """Wait until so many requests run."""
        self.wait_until(lambda: self.metric("num_requests_running") == count)

    def wait_drained(self, seconds: float = 10) -> None:
        """Wait until nothing runs or waits and no block is held."""
        self.wait_until(
            lambda: (
                self.metric("num_requests_running") == 0
                and self.metric("num_requests_waiting") == 0
                and self.metric("kv_cache_usage_perc") == 0
            ),
            seconds,
        )

    def check_gone(self, pids: list[int], seconds: float = 30) -> None:
        """Raise unless processes, sockets and port are gone."""
        # A child that was just born is in no list of pids; it tidies up when it goes.
        self.wait_until(
            lambda: not any(psutil.pid_exists(pid) for pid in pids) and not list(self.folder.iterdir()),
            seconds,
        )
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", self.port))

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())]


@contextlib.contextmanager
def serving(tmp_path: Path, *flags: str, model: str = "smollm2", wait: bool = True) -> Iterator[Server]:
    """Start a server, and end it with all its children whatever happens.

    wait: until it takes requests and has said where. Not for servers that log less than that.
    """
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        log = tmp_path / f"server-{port}.log"
        stderr = stack.enter_context(log.open("w"))
        # Sockets go to a folder of this server's own, whose path is short: what is left in it is this server's.
        # Children of a parent that was killed may still be taking theirs away.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True))
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", model, "--port", str(port), *flags],
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        server = Server(process, port, log, Path(folder))
        try:
            if wait:
                server.wait_until(
                    lambda: process.poll() is not None or (server.is_ready() and server.is_announced()), 120
                )
                assert process.poll() is None, log.read_text()
            yield server
        finally:
            process.kill()
            process.wait()
