"""The parent of a server's processes: it starts them, watches them, and ends them in order. It does nothing else.

    headrace serve ── headrace-core-0    the engine
                   ├─ headrace-api-0     HTTP
                   └─ headrace-api-1     …

A process that dies is noticed by its pipe. A dead engine is told to the API processes, which fail every open request
with the cause; a dead API process is told to the engine, which ends its requests, and another takes its place. The
death of the parent ends them all.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from headrace.configuration import Started
from headrace.core.errors import EngineError, HeadraceError
from headrace.process.child import Child
from headrace.process.core_process import CoreProcess
from headrace.process.launch import launch_spec
from headrace.process.logs import LogChoice, set_up_logs
from headrace.process.messages import Codec, Gone
from headrace.server.api_main import ApiWork
from headrace.server.listening import listen, url_of
from headrace.server.options import ServerSection

__all__ = ["Supervisor", "serve"]

logger = logging.getLogger("headrace.serve")

INTERRUPT_DRAIN_SECONDS = 2.0
"""Ctrl-C: somebody waits at a terminal, so running requests get less time than after SIGTERM."""
CLOSE_SECONDS = 5.0
"""Beyond the time for draining: closing connections and exiting."""
MAX_CRASHES = 3
CRASH_WINDOW_SECONDS = 30.0
"""So many API processes that die within so many seconds stop the server."""


def serve(started: Started) -> int:
    """Serve until a signal ends it; returns the exit status.

    Raises `ConfigError` where the address cannot be had, and whatever building the engine raises.
    """
    options = started.config.section("server", ServerSection)
    sock = listen(options)
    set_up_logs(_logs(options))
    try:
        return asyncio.run(Supervisor(started, options, sock).run())
    finally:
        sock.close()


def _logs(options: ServerSection) -> LogChoice:
    return LogChoice(options.log_format, options.log_level.upper())


@dataclass
class _Api:
    child: Child
    name: str
    is_ready: bool = False


class Supervisor:
    """Runs one server."""

    def __init__(self, started: Started, options: ServerSection, sock: socket.socket) -> None:
        self._started = started
        self._options = options
        self._sock = sock
        self._logs = _logs(options)
        self._launch = launch_spec(started)
        self._core = CoreProcess(started, logs=self._logs)
        self._core_is_ready = False
        self._restarts_left = options.restart_engine
        self._apis: list[_Api] = []
        self._num_started = 0
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._is_draining = False
        self._announced = False
        self._ended: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Start everything and wait for the end."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._watch_core()
            for index in range(self._options.api_server_count):
                self._start_api(index)
            return await self._ended
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await self._end_all()

    def _end(self, status: int | HeadraceError) -> None:
        assert self._ended is not None
        if self._ended.done():
            return
        if isinstance(status, HeadraceError):
            self._ended.set_exception(status)
        else:
            self._ended.set_result(status)

    async def _end_all(self) -> None:
        """Nothing of ours outlives this process: who does not end by itself is killed."""
        for api in self._apis:
            api.child.kill()
        await asyncio.to_thread(self._core.stop, CLOSE_SECONDS if self._core_is_ready else 0)

    # The engine --------------------------------------------------------------------------------------

    def _watch_core(self) -> None:
        asyncio.get_running_loop().add_reader(self._core.child.status_fd, self._on_core)

    def _on_core(self) -> None:
        """The engine's process says that it is ready, that it cannot be, or is gone."""
        try:
            report = self._core.child.read_status()
        except HeadraceError as error:
            self._unwatch(self._core.child)
            self._end(error)
            return
        if report is None:
            self._unwatch(self._core.child)
            self._core_died()
            return
        self._core_is_ready = True
        if self._started.config.show_report and not self._announced:
            sys.stderr.write(f"{report}\n")
        self._tell_apis({"engine": "ready"})
        self._announce()

    def _core_died(self) -> None:
        cause = self._core.cause
        if not self._core_is_ready and not self._announced:
            self._end(EngineError(cause))
            return
        if self._is_draining:
            return
        logger.error("%s", cause)
        self._core_is_ready = False
        self._tell_apis({"engine": "lost", "cause": cause})
        if self._restarts_left:
            self._restarts_left -= 1
            logger.warning("starting the engine again (%d more times, restart_engine)", self._restarts_left)
            self._core.restart()
            self._watch_core()

    # API processes -----------------------------------------------------------------------------------

    def _start_api(self, index: int) -> None:
        name = f"api-{self._num_started}"  # a process that takes another's place is not that one
        self._num_started += 1
        work = ApiWork(
            self._launch,
            self._core.address,
            name,
            index,
            self._sock.fileno(),
            self._core_is_ready,
            self._logs,
        )
        child = Child(
            "headrace.server.api_main", f"headrace-api-{index}", work, pass_fds=[self._sock.fileno()]
        )
        api = _Api(child, name)
        self._apis.append(api)
        asyncio.get_running_loop().add_reader(child.status_fd, self._on_api, api, index)

    def _on_api(self, api: _Api, index: int) -> None:
        """An API process says that it is ready, that it cannot be, or is gone."""
        try:
            ready = api.child.read_status()
        except HeadraceError as error:
            self._unwatch(api.child)
            self._end(error)
            return
        if ready is not None:
            api.is_ready = True
            self._announce()
            return
        self._unwatch(api.child)
        api.child.wait(CLOSE_SECONDS)
        self._apis.remove(api)
        if self._is_draining:
            if not self._apis:
                self._end(0)
            return
        self._api_died(api, index)

    def _api_died(self, api: _Api, index: int) -> None:
        logger.error(
            "API process %s (pid %d) %s", api.name, api.child.pid, api.child.death() or "fell silent"
        )
        self._tell_core_gone(api.name)
        self._crashes.append(time.monotonic())
        if len(self._crashes) == MAX_CRASHES and self._crashes[-1] - self._crashes[0] < CRASH_WINDOW_SECONDS:
            self._end(
                EngineError(
                    f"{MAX_CRASHES} API processes died within {CRASH_WINDOW_SECONDS:g} s; the last "
                    f"{api.child.death()}"
                )
            )
            return
        self._start_api(index)

    def _tell_core_gone(self, front: str) -> None:
        context: zmq.Context[Any] = zmq.Context()
        with context, context.socket(zmq.DEALER) as teller:
            teller.set(zmq.LINGER, 1000)
            teller.connect(self._core.address)
            teller.send(Codec(self._started.plugins.registry.stash_keys).encode(Gone(front)))

    def _tell_apis(self, order: dict[str, Any]) -> None:
        for api in self._apis:
            api.child.order(order)

    def _unwatch(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.status_fd)

    def _announce(self) -> None:
        if self._announced or not self._core_is_ready or not all(api.is_ready for api in self._apis):
            return
        self._announced = True
        logger.info("serving %s on %s", self._started.config.model, url_of(self._sock, self._options))

    # The end -----------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal drains, the second ends everything at once."""
        # One API process is enough to be asked: whoever was must get the answer.
        was_asked = self._announced or (self._core_is_ready and any(api.is_ready for api in self._apis))
        if self._is_draining or not was_asked:
            self._end(128 + number)
            return
        self._is_draining = True
        seconds = self._options.drain_timeout
        if number == signal.SIGINT:
            seconds = min(seconds, INTERRUPT_DRAIN_SECONDS)
        logger.info(
            "%s: running requests have %g s to end; a second signal ends them now", number.name, seconds
        )
        for api in [api for api in self._apis if not api.is_ready]:
            self._unwatch(api.child)
            api.child.kill()
            self._apis.remove(api)
        if not self._apis:
            self._end(0)
        self._tell_apis({"drain": seconds})
        asyncio.get_running_loop().call_later(seconds + CLOSE_SECONDS, self._end, 0)
