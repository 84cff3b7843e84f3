"""The engine core's process, as the process that started it holds it."""

from __future__ import annotations

import os
import shutil
import tempfile

from headrace.configuration import Started
from headrace.core.errors import EngineError
from headrace.executors.openmp import waiting_environ
from headrace.process.child import Child
from headrace.process.core_main import CoreWork
from headrace.process.launch import launch_spec
from headrace.process.logs import LogChoice

__all__ = ["CoreProcess"]

LONGEST_SOCKET_PATH = 90
"""Unix sockets have room for 107 bytes; a file's name comes on top."""
STOP_SECONDS = 10.0
"""How long a core may take to end by itself: a step of a long prompt may be under way."""


class CoreProcess:
    """Starts the process; `wait_ready` says when the engine is there.

    Raises `ConfigError` for a configuration that cannot be started elsewhere.
    """

    def __init__(
        self,
        started: Started,
        *,
        index: int = 0,
        logs: LogChoice | None = None,
    ) -> None:
        self._launch = launch_spec(started)
        self._index = index
        self._logs = logs or LogChoice(level="WARNING")
        self._folder = _socket_folder()
        self.address = f"ipc://{self._folder}/core-{index}"
        self.child = self._spawn()

    def _spawn(self) -> Child:
        work = CoreWork(self._launch, self._folder, self.address, self._index, self._logs)
        return Child(
            "headrace.process.core_main",
            f"headrace-core-{self._index}",
            work,
            environ=waiting_environ(os.environ),
        )

    def wait_ready(self) -> str:
        """Wait until the engine is there; return its start-up report.

        Raises what it raised, and `EngineError` where its process is gone.
        """
        try:
            report = self.child.read_status()
        except BaseException:
            self.stop(0)
            raise
        if report is None:
            raise EngineError(self.cause)
        return report

    @property
    def cause(self) -> str:
        """Why nothing comes any more, for a process that is gone."""
        self.child.wait(1)
        return f"the engine core process (pid {self.child.pid}) {self.child.death() or 'fell silent'}"

    def restart(self) -> None:
        """Start a new process in the place of one that is gone; `wait_ready` is due again."""
        self.child.kill()
        self.child = self._spawn()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the process, by itself or after so many seconds by force; may be called twice."""
        self.child.order("stop")
        if seconds:
            self.child.wait(seconds)
        self.child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _socket_folder() -> str:
    """Make a folder that only this user may look into, with a path that is short enough for sockets in it."""
    folder = tempfile.mkdtemp(prefix="headrace-")
    if len(folder) > LONGEST_SOCKET_PATH:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="headrace-", dir="/tmp")
    return folder
