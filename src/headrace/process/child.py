"""Child processes of Headrace: exec'ed, told their work on standard input, and gone when their parent is.

    parent → child, standard input: one line with the work, then a line an order; its end means the parent is gone
    child → parent, standard output: one line when it is ready, or why it cannot be; its end means the child is gone

Both directions are pipes that only these two hold, so that a process that is killed is noticed at once, whatever
it was doing. A child has a process group of its own: Ctrl-C in a terminal reaches the parent alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.core.errors import CheckpointError, ConfigError, EngineError, HeadraceError, RequestError

__all__ = ["Child", "ParentLine"]

_ERRORS: Mapping[str, type[HeadraceError]] = {
    error.__name__: error for error in (ConfigError, CheckpointError, RequestError, EngineError)
}
"""What a child may fail with and the parent raises in its stead; anything else is an `EngineError`."""


class Child:
    """A child, as its parent holds it.

    Parameters
    ----------
    module: run as `python -m`.
    name: for messages and the process's title.
    work: plain values or msgspec structs.
    pass_fds: file descriptors that it inherits.
    environ: what its environment has besides this one's.
    """

    def __init__(
        self,
        module: str,
        name: str,
        work: Any,
        *,
        pass_fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            env={**os.environ, **(environ or {})},
            process_group=0,
        )
        self.order(work)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status_fd(self) -> int:
        """Readable when it said something, or is gone."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read_status(self) -> str | None:
        """Wait for its next line and return what it is ready for; None: it is gone.

        Raises the error with which it says that it failed.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        status = msgspec.json.decode(line)
        if "error" in status:
            raise _ERRORS.get(status["kind"], EngineError)(status["error"])
        return str(status["ready"])

    def order(self, what: Any) -> None:
        """Send a line; a child that is gone hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(msgspec.json.encode(what) + b"\n")
            self._process.stdin.flush()

    def death(self) -> str | None:
        """Say in words how it ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is gone; returns whether it is."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it at once, if it still runs, and let go of its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class ParentLine:
    """The line to the parent, as a child holds it. What is printed in a child goes to standard error."""

    def __init__(self) -> None:
        self._rest = b""
        self._status = os.dup(1)
        os.set_inheritable(self._status, False)
        os.dup2(2, 1)

    def work(self) -> bytes:
        """Read the first line. Ends the process where the parent is gone already."""
        line = self._read_line()
        if line is None:
            raise SystemExit(1)
        return line

    def _read_line(self) -> bytes | None:
        """Return a whole line; None: there will be none. Without Python's buffers, whose locks outlive a thread."""
        while b"\n" not in self._rest:
            more = os.read(0, 65536)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def ready(self, what: str) -> None:
        """Say that the child is ready, with a word for the parent."""
        self._say({"ready": what})

    def failed(self, error: HeadraceError) -> None:
        """Say why it cannot be."""
        self._say({"error": str(error), "kind": type(error).__name__})

    def _say(self, status: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._status, msgspec.json.encode(status) + b"\n")

    def listen(self, on_order: Callable[[Any], None], on_orphaned: Callable[[], None]) -> None:
        """Hand the parent's further lines to `on_order`, on a thread; `on_orphaned` when it is gone, and exit then.

        The exit does not wait for anything: a step may take seconds, and nobody is left to hear of it.
        """

        def read() -> None:
            while (line := self._read_line()) is not None:
                on_order(msgspec.json.decode(line))
            on_orphaned()
            os._exit(1)

        threading.Thread(target=read, name="parent", daemon=True).start()
