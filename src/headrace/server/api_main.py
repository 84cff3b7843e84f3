"""An API process, `python -m headrace.server.api_main`: HTTP to clients, ZeroMQ to the engine core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import setproctitle
import uvicorn

from headrace.async_llm import AsyncLLM
from headrace.core.errors import EngineError, HeadraceError
from headrace.process.child import ParentLine
from headrace.process.collecting import keep_what_started
from headrace.process.launch import LaunchSpec, started_from
from headrace.process.logs import LogChoice, set_up_logs
from headrace.server.options import ServerSection
from headrace.server.stats_log import log_stats
from headrace.server.template import chosen_template

__all__ = ["ApiProcess", "ApiWork", "main"]

logger = logging.getLogger("headrace.api")

KEEP_ALIVE_SECONDS = 60
CLOSE_SECONDS = 2
"""For connections on which an answer is being sent when the process ends."""
REFUSED = "the server is shutting down and begins nothing new; try another one"


class ApiWork(msgspec.Struct):
    """What an API process is told."""

    launch: LaunchSpec
    address: str
    """Of the engine core."""
    name: str
    """Of this front end; none has it twice."""
    index: int
    socket_fd: int
    engine_is_ready: bool
    """Whether the engine answers already; else an order says when it does."""
    logs: LogChoice


def main() -> int:
    """Serve until told to drain; returns the exit status."""
    parent = ParentLine()
    work = msgspec.json.decode(parent.work(), type=ApiWork)
    setproctitle.setproctitle(f"headrace-api-{work.index}")
    set_up_logs(work.logs)
    try:
        api = ApiProcess(work, parent)
    except HeadraceError as error:
        parent.failed(error)
        return 1
    keep_what_started()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(api.run())
    return 0


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on every system
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """Leaves signals alone: this process is told by its parent when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class ApiProcess:
    """One API process. Raises `HeadraceError` where the configuration cannot be served."""

    def __init__(self, work: ApiWork, parent: ParentLine) -> None:
        from headrace.server.gate import Gate
        from headrace.server.service import build_service

        self._work = work
        self._parent = parent
        started = started_from(work.launch)
        self._options = started.config.section("server", ServerSection)
        self._llm = AsyncLLM(started, name=work.name, chat_template=chosen_template(self._options))
        self._gate: Gate = build_service(self._llm, self._options)
        self._server = _Server(
            uvicorn.Config(
                self._gate,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                ssl_certfile=self._options.ssl_certfile,
                ssl_keyfile=self._options.ssl_keyfile,
            )
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Listen to clients and to the parent."""
        loop = asyncio.get_running_loop()

        def on_order(order: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._on_order, order)

        self._parent.listen(on_order, lambda: None)
        if self._work.engine_is_ready:
            self._begin(self._connect())
        if self._work.index == 0 and self._options.log_stats_interval:
            self._begin(log_stats(self._llm, self._options.log_stats_interval))
        sock = socket.socket(fileno=self._work.socket_fd)
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._parent.ready("listening")
        await serving
        for task in self._tasks:
            task.cancel()
        await self._llm.shutdown()

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.critical("this process cannot go on", exc_info=task.exception())
            os._exit(1)  # its parent starts another

    def _on_order(self, order: dict[str, Any]) -> None:
        if order.get("engine") == "ready":
            self._begin(self._connect())
        elif order.get("engine") == "lost":
            self._llm.lose(EngineError(order["cause"]))
        elif "drain" in order:
            self._begin(self._drain(float(order["drain"])))

    async def _connect(self) -> None:
        try:
            await self._llm.connect(self._work.address)
        except EngineError as error:
            logger.error("no engine: %s", error)  # its end comes as an order as well

    async def _drain(self, seconds: float) -> None:
        """Begin nothing new, let running requests end, and end what is left with an error."""
        self._gate.close(REFUSED)
        if self._llm.lost is None:
            with contextlib.suppress(HeadraceError):
                await self._llm.call("", "refuse_waiting", REFUSED)
        deadline = asyncio.get_running_loop().time() + seconds
        while self._gate.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._gate.num_open:
            logger.warning("%d requests did not end within %g s", self._gate.num_open, seconds)
            self._llm.fail_all(
                EngineError(f"the server is shutting down; this request had {seconds:g} s to end")
            )
        self._server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
