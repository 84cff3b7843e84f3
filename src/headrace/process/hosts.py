"""Where the engine core of an `AsyncLLM` runs: in a process of its own, or on a thread of this one."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import zmq

from headrace.configuration import Started
from headrace.core.errors import EngineError
from headrace.executors.openmp import waiting_environ
from headrace.process.core_process import CoreProcess

__all__ = ["EngineHost", "ProcessHost", "ThreadHost", "host_engine"]


class EngineHost(Protocol):
    """A core that serves front ends."""

    address: str

    def watch(self, on_lost: Callable[[EngineError], None]) -> None:
        """Call `on_lost` on this event loop when the core is gone."""
        ...

    async def stop(self) -> None:
        """End the core."""
        ...


async def host_engine(started: Started, context: zmq.Context[Any]) -> EngineHost:
    """Start a core and wait until it is there. Raises as building the engine does."""
    if started.config.parallel.engine_process is False:
        thread = ThreadHost(started, context)
        await asyncio.wrap_future(thread.ready)
        return thread
    process = ProcessHost(started)
    try:
        await asyncio.to_thread(process.core.wait_ready)
    except asyncio.CancelledError:
        process.core.stop(0)
        raise
    return process


class ProcessHost:
    """Implements `EngineHost` with a process."""

    def __init__(self, started: Started) -> None:
        self.core = CoreProcess(started)
        self.address = self.core.address

    def watch(self, on_lost: Callable[[EngineError], None]) -> None:
        """Call `on_lost` when the process is gone: its end of the pipe closes."""
        loop, pipe = asyncio.get_running_loop(), self.core.child.status_fd

        def gone() -> None:
            loop.remove_reader(pipe)
            on_lost(EngineError(self.core.cause))

        loop.add_reader(pipe, gone)

    async def stop(self) -> None:
        """End the process."""
        asyncio.get_running_loop().remove_reader(self.core.child.status_fd)
        await asyncio.to_thread(self.core.stop)


class ThreadHost:
    """Implements `EngineHost` with a thread of this process: the same loop, and sockets that stay inside.

    context: the front end's, which sockets of this kind must share.
    """

    address = "inproc://headrace-core"

    def __init__(self, started: Started, context: zmq.Context[Any]) -> None:
        self._started = started
        self._context = context
        self._server: Any = None
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if "torch" not in sys.modules:  # its OpenMP runtime reads the environment once, when it is loaded
            os.environ.update(waiting_environ(os.environ))
        from headrace.process.core_server import CoreServer  # with it comes torch

        try:
            self._server = CoreServer(self._started, self._context, self.address)
        except Exception as error:  # noqa: BLE001 - it is raised where the engine was asked for
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        try:
            self._server.run()
        except EngineError:
            return  # said where it happened, and to front ends

    def watch(self, on_lost: Callable[[EngineError], None]) -> None:
        """A thread's engine tells its end itself."""

    async def stop(self) -> None:
        """End the thread."""
        if self._server is not None:
            self._server.stop()
        await asyncio.to_thread(self._thread.join)
